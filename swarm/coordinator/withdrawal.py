"""Withdrawals by the operator (`peer coordinate`): a peer, all that came by one invite, the invite printed so far.

A ban of a peer takes its guests as well, and theirs, but for those that the operator names: they may be keys of that
peer. The printed invite keeps its present guests: members of a last head, and peers with a record. A key that came once
is not present.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from peer.catalogue.groups import InviteWithdrawn
from peer.errors import ConfigError
from peer.identity import is_peer_id, peer_id_of, public_key_of
from swarm.coordinator.coordinated_group import CoordinatedGroup
from swarm.membership.bans import extend_bans
from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import REFRESH_S, TTL_S, Membership
from swarm.membership.proven_heads import ask_proven_heads
from swarm.run.agreement import agreement_config, sponsor_name
from swarm.run.gate import Gate
from swarm.run.inviting import saved_invite_keys
from swarm.run.peer_context import Place

NAME_CHARS_MIN: Final = 8  # of an invite: as `peer status --guests` shows it
_LOOK_S: Final = 0.25


@dataclass(frozen=True)
class NamedBans:
    """The peers that `--ban` and `--keep` name."""

    peers: frozenset[str]
    withdrawn: Mapping[bytes, frozenset[bytes]]
    """The keys by which no other peer comes, with the keys of those that stay."""


def named_bans(banned: Iterable[str], kept: Iterable[str], sponsors: Iterable[bytes]) -> NamedBans:
    """Return what the words of the operator mean: peer ids, and names of invites with these keys `sponsors`.

    Raises ConfigError for a word that names nothing."""
    stay = kept_keys(kept)
    names = {sponsor_name(key): key for key in sponsors}
    peers, withdrawn = set[str](), dict[bytes, frozenset[bytes]]()
    for word in banned:
        if is_peer_id(word):
            peers.add(word)
            if stay:
                withdrawn[public_key_of(word)] = stay
            continue
        found = [key for name, key in names.items() if len(word) >= NAME_CHARS_MIN and name.startswith(word.lower())]
        if len(found) != 1:
            raise ConfigError(
                f"--ban {word} is no peer id, and no invite of that name has brought a peer here:"
                " `peer status INVITE --json` lists the peers, and `--guests` the invites"
            )
        withdrawn[found[0]] = stay
    return NamedBans(frozenset(peers), withdrawn)


def kept_keys(kept: Iterable[str]) -> frozenset[bytes]:
    """Return the public keys of the peers that `--keep` names. Raises ConfigError for what is no peer id."""
    named = tuple(kept)
    for word in named:
        if not is_peer_id(word):
            raise ConfigError(f"--keep {word} is no peer id: `peer status INVITE --json` lists them")
    return frozenset(public_key_of(word) for word in named)


async def withdraw_printed(
    place: Place,
    gate: Gate,
    membership: Membership[MemberRecord],
    groups: Sequence[CoordinatedGroup],
    kept: Iterable[str],
) -> None:
    """Withdraw the invite printed so far: of the peers that came by it, the present ones and those `kept` stay.

    Reports which peers it keeps. It takes some seconds, in which the peers come back to a coordinator that was away."""
    host, home, manifest = place.host, place.home, place.manifest
    named, told = kept_keys(kept), list[str]()
    dropped = 0
    for key in saved_invite_keys(home):
        seen = await _seen(membership, groups, bool(gate.guests.guests(key)))
        there = seen.keys() | await _members(place, groups, seen)
        came = gate.guests.guests(key) | {
            public_key_of(peer)
            for peer, record in seen.items()
            if any(link.key == key for link in record.credential[:-1])
        }
        stay = frozenset(guest for guest in came if peer_id_of(guest) in there) | named
        signed = extend_bans(home.bans, host.identity, manifest, (), {key: stay})
        if signed is not None:
            gate.learn_bans(signed)
        dropped += len(came - stay)
        told += sorted(_name(peer_id_of(guest), seen) for guest in stay)
    host.events.emit(InviteWithdrawn(kept=tuple(told), dropped=dropped))


async def _seen(
    membership: Membership[MemberRecord], groups: Sequence[CoordinatedGroup], met: bool
) -> dict[str, MemberRecord]:
    """Return the records of the present peers. `met`: whether guests of the invite have connected."""
    seen: dict[str, MemberRecord] = {}
    with trio.move_on_after(TTL_S + REFRESH_S):
        while True:
            seen |= membership.view
            members = {member.peer for group in groups for member in group.head.members}
            if members <= seen.keys() and (members or not met):
                break
            await trio.sleep(_LOOK_S)
        if members:  # who is in no head may have been read a moment later
            await trio.sleep(REFRESH_S)
    return seen | dict(membership.view)


async def _members(place: Place, groups: Sequence[CoordinatedGroup], seen: Iterable[str]) -> set[str]:
    """Return the members of the last heads: those known here, and those that the peers prove."""
    members = {member.peer for group in groups for member in group.head.members}
    for group in groups:
        config = agreement_config(place.manifest, group.stage or 0, place.host.peer_id)
        proven = await ask_proven_heads(place.host, config, seen)
        members |= {member.peer for best in proven[:1] for member in best.head.members}
    return members


def _name(peer: str, seen: Mapping[str, MemberRecord]) -> str:
    record = seen.get(peer)
    return f"{record.name if record else 'away'} {peer[-6:]}"
