"""Printing invites: by the authority, and by each member of a run that came with the right to bring in others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from peer.errors import ConfigError
from peer.identity import Identity, public_key_of
from peer.net.address_book import AddressBook, is_circuit
from swarm.run.ban_list import BanList
from swarm.run.credentials import CHAIN_MAX, GUESTS_DEFAULT, INVITE_DAYS, Chain, member_link, sign_link
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite, read_saved_invite
from swarm.run.manifest import AnyManifest

DAY_S: Final = 86400.0
_OTHERS_MAX: Final = 2


def make_invite(
    inviter: Identity, chain: Chain, manifest: AnyManifest, addresses: Iterable[str], *, guests: int, days: float
) -> Invite:
    """Return an invite that `inviter` may sign: for `guests` peers in a closed run, without a key in an open one.

    `chain` is the inviter's own; empty for the authority. Raises ConfigError if that peer may not invite.
    """
    named = tuple(addresses)[:ADDRESSES_MAX]
    if manifest.open:
        return Invite(manifest.run_id, manifest.authority, named)
    expires = _expiry(inviter, chain, manifest, days)
    if chain and (chain[-1].guests < 1 or len(chain) + 2 > CHAIN_MAX):
        raise ConfigError(
            "this peer was invited without the right to invite others: ask the owner of the run for an invite"
        )
    key = Identity.generate()
    may_bring = min(guests, chain[-1].guests) if chain else guests
    link = sign_link(inviter, manifest.run_id, "invite", public_key_of(key.peer_id), guests=may_bring, expires=expires)
    return Invite(manifest.run_id, manifest.authority, named, (*chain, link), key.seed)


def make_personal_invite(
    authority: Identity, manifest: AnyManifest, addresses: Iterable[str], guest: str, *, days: float
) -> Invite:
    """Return the authority's invite for the peer `guest` alone. It holds no secret, and its peer may not invite."""
    expires = _expiry(authority, (), manifest, days)
    link = member_link(authority, manifest.run_id, guest, (), expires)
    return Invite(manifest.run_id, manifest.authority, tuple(addresses)[:ADDRESSES_MAX], (link,))


def saved_invite_keys(home: Home) -> tuple[bytes, ...]:
    """Return the public key of the invite that a coordinator has printed last; none in an open run."""
    with suppress(ConfigError):
        saved = read_saved_invite(home.path)
        if saved.key:
            return (saved.chain[-1].key,)
    return ()


def printed_invite(
    home: Home, authority: Identity, manifest: AnyManifest, addresses: Sequence[str], bans: BanList | None
) -> Invite:
    """Return the invite that a coordinator prints: that of its home as long as it lasts, else a new one.

    So one invite stays one, with one count of its guests, however often the coordinator is started.
    """
    with suppress(ConfigError):
        saved = read_saved_invite(home.path)
        lasts = saved.key and saved.chain[-1].expires - time.time() > INVITE_DAYS * DAY_S / 2
        withdrawn = bans is not None and saved.key and saved.chain[-1].key in bans.withdrawn
        if saved.run_id == manifest.run_id and lasts and not withdrawn:
            return Invite(saved.run_id, saved.authority, tuple(addresses)[:ADDRESSES_MAX], saved.chain, saved.key)
    return make_invite(authority, (), manifest, addresses, guests=GUESTS_DEFAULT, days=INVITE_DAYS)


def with_living(home: Home, own: Iterable[str]) -> tuple[str, ...]:
    """Return a peer's own addresses and those of recently reachable members (`swarm.membership.living`)."""
    living = home.living_addresses()
    mine = tuple(own)[: ADDRESSES_MAX - len(living)]
    return tuple(dict.fromkeys((*mine, *living)))[:ADDRESSES_MAX]


def known_addresses(home: Home) -> tuple[str, ...]:
    """Return addresses to put into an invite: those of this home's peer, of its invite, and of recently reachable
    members or, if it knows none, of the peers that it met last.

    At most three of one peer, so that the invite works while some of them are away.
    """
    own: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        own = home.listening.read_text().split()
    others = home.living_addresses() or _met(home)
    found: list[str] = []
    for address in (*own, *read_saved_invite(home.path).addresses, *others):
        peer = address.rpartition("/p2p/")[2]
        if address not in found and sum(other.endswith(peer) for other in found) < 3:
            found.append(address)
    return tuple(found[:ADDRESSES_MAX])


def _met(home: Home) -> list[str]:
    """Return the direct addresses of peers that this home's peer met, the last ones first."""
    book = AddressBook(ADDRESSES_MAX)
    book.load(home.addresses)
    direct = [(peer, [each for each in book.get(peer) if not is_circuit(each)]) for peer in reversed(book.peers)]
    reached = [(peer, addresses) for peer, addresses in direct if addresses]
    return [f"{address}/p2p/{peer}" for peer, addresses in reached[:_OTHERS_MAX] for address in addresses[:1]]


def _expiry(inviter: Identity, chain: Chain, manifest: AnyManifest, days: float) -> float:
    if not chain and inviter.peer_id != manifest.authority:
        raise ConfigError("this home's peer has no credential of this run: give the --home of `peer join`")
    return min([time.time() + days * DAY_S, *(link.expires for link in chain)])
