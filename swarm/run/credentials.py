"""Credentials of a closed run: chains of signatures that begin with the run's authority.

    authority -> invite -> member -> invite -> member -> client

Each link names a public key and what its holder may do, signed by the key before it. A chain is public: a peer sends it
and proves by a signature that it has the key at its end (`swarm.run.gate`). Only the private key of an invite is
secret. Its holder signs the link of its own peer id with it, once and without any network, and never shows it.

Members check chains with nothing but the manifest, so peers join while the authority is away, and a member invites
others. An open run asks for no chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec

from peer.errors import NotAdmitted
from peer.identity import Identity, peer_id_of, public_key_of, sign_bytes, verify_bytes
from peer.net.admissions import Access
from swarm.run.ban_list import BanList, Key
from swarm.run.manifest import AnyManifest

INVITE_DAYS: Final = 30
GUESTS_DEFAULT: Final = 8
GUESTS_MAX: Final = 1024
CHAIN_MAX: Final = 5
EXPIRES_END: Final = 1 << 40  # Unix seconds
CLIENT_S: Final = 3600.0  # of a client's link; a client that stays signs another (`swarm.run.gate`)
CLIENT_MAX_S: Final = 2 * CLIENT_S  # what is accepted: a client's clock may be ahead by the difference
CLOCK_SKEW_S: Final = 120.0  # clocks differ: a link is accepted this long after its time

_KIND: Final = "credential"
_REMEDY: Final = "ask the peer that invited you for a new invite"

LinkKind = Literal["invite", "member", "client"]
_FOLLOWS: Final[dict[LinkKind | None, tuple[LinkKind, ...]]] = {
    None: ("invite", "member", "client"),  # the authority
    "invite": ("member", "client"),
    "member": ("invite", "client"),
    "client": (),
}


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One key of a chain and what its holder may do."""

    kind: LinkKind
    """An invite admits members and clients, a member takes part and may invite, a client reads."""
    key: Key
    guests: Annotated[int, msgspec.Meta(ge=0, le=GUESTS_MAX)]
    """How many members it may bring in, directly or through those. A client and a member that may not invite: 0."""
    expires: Annotated[int, msgspec.Meta(ge=0, lt=EXPIRES_END)]
    """Unix seconds."""
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    """By the holder of the key before it, over the run's id and all of the above."""


Chain = Annotated[tuple[Link, ...], msgspec.Meta(max_length=CHAIN_MAX)]


@dataclass(frozen=True)
class Rights:
    """A peer's rights by its credential."""

    access: Access
    until: float
    """Unix time."""
    member: bytes | None = None
    """The public key of the member; None for a client and in an open run."""
    sponsors: tuple[Link, ...] = ()
    """The links above a member, each with a limit of members."""


def sign_link(signer: Identity, run_id: str, kind: LinkKind, key: bytes, *, guests: int, expires: float) -> Link:
    """Return a link that `signer`, the holder of the key before it, adds to its chain."""
    link = Link(kind, key, guests, int(expires), bytes(64))
    return msgspec.structs.replace(link, signature=sign_bytes(signer, _KIND, _signed(run_id, link)))


def member_link(signer: Identity, run_id: str, peer: str, chain: Chain, expires: float) -> Link:
    """Return the link of the member `peer`, signed by the invite (or authority) at the end of `chain`."""
    guests = chain[-1].guests if chain else 0
    return sign_link(signer, run_id, "member", public_key_of(peer), guests=guests, expires=expires)


def client_link(signer: Identity, run_id: str, peer: str, expires: float) -> Link:
    """Return the link of the client `peer`, signed by an invite, a member or the authority."""
    return sign_link(signer, run_id, "client", public_key_of(peer), guests=0, expires=expires)


def judge(manifest: AnyManifest, chain: Chain, peer: str, now: float, bans: BanList | None = None) -> Rights:
    """Return what the peer `peer` with this chain may do at Unix time `now`. Raises NotAdmitted, with the remedy.

    How many guests an invite has brought in already is for the caller to count (`swarm.run.guests`).
    """
    if bans is not None and peer in bans.peers:
        raise NotAdmitted(f"peer {peer} is banned from this run: write to the owner of the run")
    if manifest.open or peer == manifest.authority:
        return Rights("member", float("inf"))
    last = check_chain(manifest, chain, peer)
    first = min(chain, key=lambda link: link.expires)
    expires = first.expires
    if now > expires + CLOCK_SKEW_S and first.kind == "client":
        raise NotAdmitted(
            f"the client's credential ended {_duration(now - expires)} ago: sign a new one and enter again"
        )
    if now > expires + CLOCK_SKEW_S:
        raise NotAdmitted(f"the invite expired {_duration(now - expires)} ago: {_REMEDY}")
    if last.kind == "client" and last.expires > now + CLIENT_MAX_S:
        raise NotAdmitted(
            f"the client's credential lasts {_duration(last.expires - now)} and at most {_duration(CLIENT_MAX_S)} are"
            " accepted: set the client's clock, or sign a credential that ends sooner"
        )
    _check_bans(chain, bans)
    until = expires + CLOCK_SKEW_S
    if last.kind == "client":
        return Rights("client", until)
    return Rights("member", until, last.key, chain[:-1])


def check_chain(manifest: AnyManifest, chain: Chain, peer: str) -> Link:
    """Return the link of `peer` at the end of a chain that the run's authority began. It may be out of date.

    Raises NotAdmitted, with the remedy, if the chain is none."""
    if not chain:
        raise NotAdmitted("this run is by invitation and the invite carries no key: ask the owner of the run for one")
    kinds = [None, *(link.kind for link in chain)]
    if any(kind not in _FOLLOWS[before] for before, kind in pairwise(kinds)):
        raise NotAdmitted(f"the credential grants what its signer may not grant: {_REMEDY}")
    if not is_signed(manifest.run_id, manifest.authority, chain):
        raise NotAdmitted(f"the credential is forged, damaged or of another run: {_REMEDY}")
    last = chain[-1]
    if last.kind == "invite" or last.key != public_key_of(peer):
        raise NotAdmitted(
            f"the invite was made out to peer {peer_id_of(last.key)}, not to {peer}:"
            " join with the --home it was made for, or ask for an invite of your own"
        )
    return last


def _check_bans(chain: Chain, bans: BanList | None) -> None:
    """Raise NotAdmitted if the chain leads through a banned peer or a withdrawn invite, and none of those further down
    is named as one that stays."""
    if bans is None:
        return
    keys = [link.key for link in chain]
    for depth, link in enumerate(chain[:-1]):
        banned = link.kind == "member" and peer_id_of(link.key) in bans.peers
        stays = bans.withdrawn.get(link.key, frozenset() if banned else None)
        if stays is None or stays.intersection(keys[depth + 1 :]):
            continue
        if banned:
            raise NotAdmitted(
                "the invite comes from a peer that is banned from this run: ask another peer of it for one, or write to"
                " its owner"
            )
        raise NotAdmitted(f"the invite has been withdrawn: {_REMEDY}")


@lru_cache(maxsize=1024)  # of chains: at most CHAIN_MAX links of fixed size each
def is_signed(run_id: str, authority: str, chain: Chain) -> bool:
    """Whether each link of the chain is signed by the key before it, the first one by the run's authority."""
    signer = authority
    for link in chain:
        if not verify_bytes(signer, _KIND, _signed(run_id, link), link.signature):
            return False
        signer = peer_id_of(link.key)
    return True


def _signed(run_id: str, link: Link) -> bytes:
    return msgspec.msgpack.encode((run_id, link.kind, link.key, link.guests, link.expires))


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
