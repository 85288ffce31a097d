"""Which peers may enter a run. Each reason to refuse has its own message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from peer.errors import CheckpointError, NotAdmitted, ProtocolViolation
from peer.identity import Identity, public_key_of
from swarm.run.ban_list import BanList, open_bans, sign_bans
from swarm.run.credentials import (
    CHAIN_MAX,
    CLIENT_MAX_S,
    CLOCK_SKEW_S,
    Chain,
    Rights,
    client_link,
    judge,
    member_link,
    sign_link,
)
from swarm.run.guests import LAPSE_S, GuestBook
from swarm.run.manifest import Manifest
from swarm.run.sections import RunRules
from tests.swarm.run.test_manifest import make_manifest

NOW = 1_700_000_000.0
AUTHORITY = Identity.generate()
GUEST = Identity.generate()


def closed_run() -> Manifest:
    return make_manifest(AUTHORITY.peer_id, run=RunRules(name="closed", open=False))


RUN_ID = closed_run().run_id


def invited(
    guest: Identity = GUEST, *, by: Identity = AUTHORITY, above: Chain = (), run_id: str = RUN_ID, guests: int = 3
) -> Chain:
    """The chain of `guest`, who came by an invite of `by`, for an hour."""
    key = Identity.generate()
    link = sign_link(by, run_id, "invite", public_key_of(key.peer_id), guests=guests, expires=NOW + 3600)
    chain = (*above, link)
    return (*chain, member_link(key, run_id, guest.peer_id, chain, NOW + 3600))


def refusal(chain: Chain, *, peer: str = GUEST.peer_id, now: float = NOW, bans: BanList | None = None) -> str:
    with pytest.raises(NotAdmitted) as caught:
        judge(closed_run(), chain, peer, now, bans)
    return str(caught.value)


def test_guests_of_the_authority_and_of_its_guests_are_members() -> None:
    friend, far = Identity.generate(), Identity.generate()
    first = invited()
    second = invited(friend, by=GUEST, above=first)
    assert judge(closed_run(), first, GUEST.peer_id, NOW).access == "member"
    assert judge(closed_run(), second, friend.peer_id, NOW).access == "member"
    assert judge(closed_run(), (), AUTHORITY.peer_id, NOW).access == "member"
    personal = (member_link(AUTHORITY, RUN_ID, far.peer_id, (), NOW + 60),)
    assert judge(closed_run(), personal, far.peer_id, NOW).access == "member"
    with pytest.raises(msgspec.ValidationError):  # bounded, so that a chain stays small
        msgspec.convert(msgspec.to_builtins(second * 2, builtin_types=(bytes,)), Chain)
    assert len(second) == 4 < CHAIN_MAX


def test_clients_of_any_holder_may_read_only() -> None:
    chain, client = invited(), Identity.generate().peer_id
    for signer, above in ((AUTHORITY, ()), (GUEST, chain)):
        seen = judge(closed_run(), (*above, client_link(signer, RUN_ID, client, NOW + 60)), client, NOW)
        assert (seen.access, seen.member) == ("client", None)
        assert seen.until == NOW + 60 + CLOCK_SKEW_S


def test_an_open_run_needs_no_chain() -> None:
    assert judge(make_manifest(AUTHORITY.peer_id), (), GUEST.peer_id, NOW).access == "member"


def test_every_refusal_has_its_own_message() -> None:
    stranger = Identity.generate()
    good = invited()
    client = client_link(GUEST, RUN_ID, stranger.peer_id, NOW + 60)
    after_client = member_link(stranger, RUN_ID, stranger.peer_id, (), NOW + 60)
    longer = msgspec.structs.replace(good[-1], expires=int(NOW + 10_000_000))
    crowded = msgspec.structs.replace(good[0], guests=1000)
    sentences = {
        "no chain": refusal(()),
        "an invite's link alone": refusal(good[:1]),
        "of another run": refusal(invited(run_id="b" * 32)),
        "of another authority": refusal(invited(by=stranger)),
        "of another peer": refusal(good, peer=stranger.peer_id),
        "a client who invites": refusal((*good, client, after_client), peer=stranger.peer_id),
        "prolonged": refusal((good[0], longer)),
        "for more guests": refusal((crowded, good[1])),
        "links swapped": refusal((invited()[0], good[1])),
        "expired": refusal(good, now=NOW + 3600 + 3 * 3600),
        "banned": refusal(good, bans=BanList(RUN_ID, 1, peers=frozenset({GUEST.peer_id}))),
    }
    for case, words in {
        "no chain": "carries no key",
        "an invite's link alone": "made out to peer",
        "of another run": "forged, damaged or of another run",
        "of another authority": "forged, damaged or of another run",
        "of another peer": f"made out to peer {GUEST.peer_id}",
        "a client who invites": "may not grant",
        "prolonged": "forged",
        "for more guests": "forged",
        "links swapped": "forged",
        "expired": "expired 3 hours ago",
        "banned": "is banned",
    }.items():
        assert words in sentences[case], f"{case}: {sentences[case]}"


def test_a_clients_credential_lasts_no_longer_than_two_hours() -> None:
    client = Identity.generate()

    def reading(lifetime_s: float) -> Chain:
        return (*invited(), client_link(GUEST, RUN_ID, client.peer_id, NOW + lifetime_s))

    assert judge(closed_run(), reading(CLIENT_MAX_S), client.peer_id, NOW).access == "client"
    told = refusal(reading(5 * 3600), peer=client.peer_id)
    assert told == (
        "the client's credential lasts 5 hours and at most 2 hours are accepted:"
        " set the client's clock, or sign a credential that ends sooner"
    )
    ended = refusal(reading(1800), peer=client.peer_id, now=NOW + 1800 + 2 * 3600)
    assert ended == "the client's credential ended 2 hours ago: sign a new one and enter again"


def test_clocks_may_be_off_by_two_minutes() -> None:
    judge(closed_run(), invited(), GUEST.peer_id, NOW + 3600 + CLOCK_SKEW_S - 1)
    refusal(invited(), now=NOW + 3600 + CLOCK_SKEW_S + 1)


def test_a_withdrawn_invite_keeps_its_guests_and_admits_no_other() -> None:
    key, other = Identity.generate(), Identity.generate()
    link = sign_link(AUTHORITY, RUN_ID, "invite", public_key_of(key.peer_id), guests=9, expires=NOW + 60)
    bans = BanList(RUN_ID, 1, withdrawn={link.key: frozenset({public_key_of(GUEST.peer_id)})})
    stays = (link, member_link(key, RUN_ID, GUEST.peer_id, (link,), NOW + 60))
    judge(closed_run(), stays, GUEST.peer_id, NOW, bans)
    late = (link, member_link(key, RUN_ID, other.peer_id, (link,), NOW + 60))
    assert "withdrawn" in refusal(late, peer=other.peer_id, bans=bans)
    looking = (link, client_link(key, RUN_ID, other.peer_id, NOW + 60))
    assert "withdrawn" in refusal(looking, peer=other.peer_id, bans=bans)


def test_a_ban_of_one_guest_does_not_hit_another() -> None:
    key, other = Identity.generate(), Identity.generate()
    link = sign_link(AUTHORITY, RUN_ID, "invite", public_key_of(key.peer_id), guests=9, expires=NOW + 60)
    bans = BanList(RUN_ID, 1, peers=frozenset({GUEST.peer_id}))
    judge(closed_run(), (link, member_link(key, RUN_ID, other.peer_id, (link,), NOW + 60)), other.peer_id, NOW, bans)


def test_a_ban_takes_whoever_came_by_the_banned_peer_but_those_that_it_names() -> None:
    friend, reader = Identity.generate(), Identity.generate()
    of_banned = invited(friend, by=GUEST, above=invited())
    looking = (*invited(), client_link(GUEST, RUN_ID, reader.peer_id, NOW + 60))
    second_hand = (*of_banned, client_link(friend, RUN_ID, reader.peer_id, NOW + 60))
    for chain, end in ((of_banned, friend), (looking, reader), (second_hand, reader)):
        judge(closed_run(), chain, end.peer_id, NOW, BanList(RUN_ID, 1))
        bans = BanList(RUN_ID, 1, peers=frozenset({GUEST.peer_id}))
        assert "from a peer that is banned" in refusal(chain, peer=end.peer_id, bans=bans)
    stays = {public_key_of(GUEST.peer_id): frozenset({public_key_of(friend.peer_id)})}
    bans = BanList(RUN_ID, 1, peers=frozenset({GUEST.peer_id}), withdrawn=stays)
    judge(closed_run(), of_banned, friend.peer_id, NOW, bans)
    judge(closed_run(), second_hand, reader.peer_id, NOW, bans)
    assert "from a peer that is banned" in refusal(looking, peer=reader.peer_id, bans=bans)


def test_an_open_run_bans_too() -> None:
    manifest = make_manifest(AUTHORITY.peer_id)
    with pytest.raises(NotAdmitted, match="banned"):
        judge(manifest, (), GUEST.peer_id, NOW, BanList(manifest.run_id, 1, peers=frozenset({GUEST.peer_id})))


def test_only_the_authoritys_ban_list_for_this_run_counts() -> None:
    manifest = closed_run()
    bans = BanList(manifest.run_id, 3, peers=frozenset({GUEST.peer_id}))
    assert open_bans(sign_bans(AUTHORITY, bans), manifest) == bans
    with pytest.raises(ProtocolViolation, match="not by"):
        open_bans(sign_bans(Identity.generate(), bans), manifest)
    with pytest.raises(ProtocolViolation, match="for run"):
        open_bans(sign_bans(AUTHORITY, BanList("c" * 32, 1)), manifest)
    crowd = BanList(manifest.run_id, 4, peers=frozenset(str(i) for i in range(5000)))
    with pytest.raises(ProtocolViolation, match="malformed"):
        open_bans(sign_bans(AUTHORITY, crowd), manifest)


def admission(chain: Chain, peer: Identity) -> Rights:
    return judge(closed_run(), chain, peer.peer_id, NOW)


Came = Callable[[Identity], Rights]


def invite_for(guests: int) -> Came:
    """Returns what an invite for so many makes of an identity."""
    key = Identity.generate()
    link = sign_link(AUTHORITY, RUN_ID, "invite", public_key_of(key.peer_id), guests=guests, expires=NOW + 60)
    return lambda guest: admission((link, member_link(key, RUN_ID, guest.peer_id, (link,), NOW + 60)), guest)


def enter(book: GuestBook, came: Rights, *, prefix: str = "192.0.2.0/24", now: float = NOW) -> None:
    """Do as a gate does."""
    book.check(came, prefix, now)
    book.enter(came, prefix, now)


def test_an_invite_brings_in_so_many_and_no_more(tmp_path: Path) -> None:
    key, book = Identity.generate(), GuestBook(tmp_path / "guests")
    link = sign_link(AUTHORITY, RUN_ID, "invite", public_key_of(key.peer_id), guests=2, expires=NOW + 60)
    first, second, third, friend = (Identity.generate() for _ in range(4))

    def came(guest: Identity) -> Rights:
        return admission((link, member_link(key, RUN_ID, guest.peer_id, (link,), NOW + 60)), guest)

    for guest in (first, second, first):  # who came once comes again
        enter(book, came(guest))
    for reader in (book, GuestBook(tmp_path / "guests")):
        with pytest.raises(NotAdmitted, match="brought in 2 peers"):
            enter(reader, came(third))
        enter(reader, came(second))
    above = (link, member_link(key, RUN_ID, first.peer_id, (link,), NOW + 60))
    with pytest.raises(NotAdmitted, match="brought in 2 peers"):  # guests of guests count too
        enter(book, admission(invited(friend, by=first, above=above), friend))
    (tmp_path / "guests").write_bytes(b"\xc1")
    with pytest.raises(CheckpointError, match="delete it"):
        GuestBook(tmp_path / "guests")


def test_the_places_of_silent_keys_lapse(tmp_path: Path) -> None:
    came, (silent, stays, late) = invite_for(2), [Identity.generate() for _ in range(3)]
    book = GuestBook(tmp_path / "guests")
    for guest in (silent, stays):
        enter(book, came(guest))
    for minutes in range(0, 59, 5):
        book.record(came(stays), NOW + 60 * minutes)  # on disk from time to time
    with pytest.raises(NotAdmitted, match="brought in 2 peers"):
        enter(book, came(late), now=NOW + LAPSE_S - 1)
    book = GuestBook(tmp_path / "guests")
    enter(book, came(late), now=NOW + LAPSE_S)
    with pytest.raises(NotAdmitted, match="brought in 2 peers"):
        enter(book, came(silent), now=NOW + LAPSE_S)
    [key] = book.sponsors
    assert len(book.guests(key)) == 3  # so that a new invite says how many it drops


def test_an_address_prefix_takes_eight_places_of_an_invite() -> None:
    came, book = invite_for(64), GuestBook()
    for _ in range(8):
        enter(book, came(Identity.generate()))
    with pytest.raises(NotAdmitted, match=r"8 peers of the address prefix 192\.0\.2\.0/24.*members_per_prefix"):
        enter(book, came(Identity.generate()))
    enter(book, came(Identity.generate()), prefix="198.51.100.0/24")
    book.per_prefix = 9
    enter(book, came(Identity.generate()))
