"""Who holds the votes of a head: by invite, as the head says, and by address prefix, as far as it is known."""

from __future__ import annotations

import msgspec
import pytest

from swarm.membership.member_record import MemberRecord
from swarm.membership.vote_shares import alarms, caution, invites_of, prefixes_told, vote_shares
from swarm.protocol.head import Head, Member, Sponsor, Sponsorship
from swarm.run.agreement import sponsor_name
from swarm.run.credentials import Link
from swarm.run.manifest import Manifest
from tests.swarm.membership.test_bans import record
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.support.stage_commits import begun

ONE, OTHER = Sponsor("11" * 16, 8), Sponsor("22" * 16, 3)


def with_mode(manifest: Manifest, coordinator: str, is_open: bool = False) -> Manifest:
    run = msgspec.structs.replace(manifest.run, coordinator=coordinator, open=is_open)
    return msgspec.structs.replace(manifest, run=run)


def head_of(manifest: Manifest, **came_by: Sponsor | None) -> Head:
    head = begun(manifest.first_head(), *(Member(peer, "s") for peer in came_by))
    entries = [Sponsorship(sponsor, peer) for peer, sponsor in came_by.items() if sponsor is not None]
    return msgspec.structs.replace(head, sponsored=tuple(sorted(entries)))


def at(*addresses: str, credential: tuple[Link, ...] = ()) -> MemberRecord:
    return msgspec.structs.replace(record("s"), addresses=list(addresses), credential=credential)


def test_half_of_the_members_by_one_invite_is_told() -> None:
    manifest = with_mode(manifest_of(1), "witness")
    few = head_of(manifest, a=ONE, b=ONE, c=OTHER, d=None, e=None)
    assert vote_shares(manifest, few, {}) == []
    half = head_of(manifest, a=ONE, b=ONE, c=OTHER, d=None)
    [share] = vote_shares(manifest, half, {})
    assert (share.invite, share.votes, share.members) == (ONE.key, 2, 4)
    assert caution(share).startswith("2 of 4 members came by the invite 11111111: if these are one person's")
    assert vote_shares(manifest, head_of(manifest, a=ONE, b=OTHER), {}) == [], "one peer is one person anyway"
    assert vote_shares(with_mode(manifest, "required"), half, {}) == [], "there a majority makes no second history"


@pytest.mark.parametrize(
    ("came_by", "prefixes", "alarming"),
    [
        ({"a": ONE, "b": ONE}, {}, []),
        ({"a": ONE, "b": ONE, "c": None}, {}, []),
        ({"a": ONE, "b": ONE, "c": OTHER}, {}, [ONE.key]),
        ({"a": ONE, "b": ONE, "c": OTHER, "d": OTHER}, {}, [ONE.key, OTHER.key]),
        ({"a": ONE, "b": ONE}, {"a": "192.168.1.0/24", "b": "192.168.1.0/24"}, []),
        ({"a": ONE, "b": ONE}, {"a": "192.168.1.0/24", "b": "127.0.0.0/24"}, []),
        ({"a": None, "b": None, "c": None}, {"a": "9.9.9.0/24", "b": "9.9.9.0/24", "c": "8.8.8.0/24"}, ["9.9.9.0/24"]),
    ],
)
def test_one_invite_or_prefix_alone_is_no_alarm(
    came_by: dict[str, Sponsor | None], prefixes: dict[str, str], alarming: list[str]
) -> None:
    manifest = with_mode(manifest_of(1), "witness")
    shares = vote_shares(manifest, head_of(manifest, **came_by), prefixes)
    assert [share.invite or share.prefix for share in alarms(shares)] == alarming and shares


def test_an_open_run_warns_of_one_prefix() -> None:
    manifest = with_mode(manifest_of(1), "witness", is_open=True)
    found = vote_shares(manifest, head_of(manifest, a=None, b=None), {"a": "9.9.9.0/24", "b": "9.9.9.0/24"})
    assert [share.prefix for share in alarms(found)] == ["9.9.9.0/24"]


def test_learners_and_peers_that_are_no_members_have_no_votes() -> None:
    manifest = with_mode(manifest_of(1), "witness")
    head = head_of(manifest, a=ONE, b=OTHER, c=OTHER, d=None, e=None)
    more = (*head.sponsored, Sponsorship(ONE, "learner"), Sponsorship(ONE, "another"))
    assert vote_shares(manifest, msgspec.structs.replace(head, sponsored=more), {"x": "203.0.113.0/24"}) == []


PREFIXES = {
    "203.0.113.0/24": True,
    "2001:db8::/64": True,
    "192.168.1.0/24": True,
    "127.0.0.0/24": False,
    "relayed": False,
}


@pytest.mark.parametrize(("prefix", "told"), PREFIXES.items())
def test_half_of_the_members_at_one_prefix_is_told(prefix: str, told: bool) -> None:
    manifest = with_mode(manifest_of(1), "witness")
    head = head_of(manifest, a=None, b=None, c=None, d=None)
    found = vote_shares(manifest, head, {"a": prefix, "b": prefix, "c": "198.51.100.0/24"})
    assert [(share.prefix, share.votes) for share in found] == ([(prefix, 2)] if told else [])
    assert all(f"2 of 4 members are at the address prefix {prefix}:" in caution(share) for share in found)


def test_the_prefix_of_a_peer_is_that_of_its_public_address() -> None:
    relay = "/ip4/8.8.8.8/tcp/4001/p2p/relay/p2p-circuit"
    told = prefixes_told(
        {
            "public": at("/ip4/192.168.1.7/tcp/1", "/ip4/9.9.9.9/tcp/1"),
            "lan": at("/ip4/192.168.1.8/tcp/1"),
            "behind": at("/ip4/192.168.1.9/tcp/1", relay),
            "six": at("/ip6/2606:4700:1:2:3:4:5:6/tcp/1"),
            "nowhere": at(),
            "named": at("/dns4/example.org/tcp/1"),
        }
    )
    assert told == {"public": "9.9.9.0/24", "lan": "192.168.1.0/24", "six": "2606:4700:1:2::/64"}


def test_who_came_by_which_invite() -> None:
    """As heads say and, of those that are in none, their records: a guest of a guest counts for both invites."""
    manifest = manifest_of(1)
    head = head_of(manifest, a=ONE, b=ONE, c=None)
    keys = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
    above = [Link("invite", key, 5, 0, bytes(64)) for key in keys[:2]]
    chain = (*above, Link("member", keys[2], 5, 0, bytes(64)))
    found = invites_of([head], {"d": at(credential=chain), "e": at()})
    assert [(one.invite, one.guests, one.peers, one.members) for one in found] == [
        (ONE.key, 8, ("a", "b"), 2),
        *sorted((sponsor_name(key), 5, ("d",), 0) for key in keys[:2]),
    ]
    assert invites_of([], {}) == []
