"""The ban list of a run, signed by its authority: peers that are out, and invites that bring in no further guests."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.errors import ProtocolViolation
from peer.identity import Identity, Signed, open_body, sign_body
from swarm.run.manifest import AnyManifest

BANS_MAX: Final = 4096
BANS_BYTES_MAX: Final = 1 << 20

_KIND: Final = "bans"

PeerId = Annotated[str, msgspec.Meta(max_length=128)]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Keys = Annotated[frozenset[Key], msgspec.Meta(max_length=BANS_MAX)]
Serial = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class BanList(msgspec.Struct, frozen=True):
    """All bans of a run. A list with a higher `serial` replaces the one before."""

    run_id: Annotated[str, msgspec.Meta(max_length=64)]
    serial: Serial
    peers: Annotated[frozenset[PeerId], msgspec.Meta(max_length=BANS_MAX)] = frozenset()
    withdrawn: Annotated[dict[Key, Keys], msgspec.Meta(max_length=BANS_MAX)] = {}
    """For each withdrawn invite (its public key) the public keys of the guests that stay."""

    @property
    def entries(self) -> int:
        return len(self.peers) + sum(1 + len(guests) for guests in self.withdrawn.values())


def sign_bans(authority: Identity, bans: BanList) -> Signed:
    """Return the ban list signed by the authority."""
    return sign_body(authority, _KIND, bans)


def open_bans(signed: Signed, manifest: AnyManifest) -> BanList:
    """Check and return a ban list from a peer; ProtocolViolation if it is not the authority's for this run."""
    bans = open_body(signed, _KIND, BanList, signer=manifest.authority)
    if bans.run_id != manifest.run_id:
        raise ProtocolViolation(f"this ban list is for run {bans.run_id}, not for {manifest.run_id}")
    if bans.entries > BANS_MAX:
        raise ProtocolViolation(f"this ban list has more than {BANS_MAX} entries")
    return bans
