"""Which peers may take part in a run: join tokens and bans, both signed by the run's authority.

An open run admits every peer. An invitation-only run asks for a token, of one of two kinds:

- *bound* to one peer id: useless to any other peer, so it may be sent over any channel;
- *bearer* (no peer id): any peer that holds it may join until it expires. Invites carry one by default.

A member checks tokens with nothing but the manifest, so peers can join while the authority is away. A token lets a peer
in. A ban of a peer puts it out, a ban of a token all peers that used it (docs/security.md).
"""

from __future__ import annotations

import secrets
from typing import Final, Literal

import msgspec

from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, open_body, sign_body
from swarm.run.manifest import AnyManifest

TOKEN_DAYS: Final = 30
CLOCK_SKEW_S: Final = 120.0  # clocks differ: a token is accepted this much before and after its time
BANS_MAX: Final = 4096

_TOKEN_KIND: Final = "join-token"
_BANS_KIND: Final = "bans"
_REMEDY: Final = "ask the peer that invited you for a new invite"
Role = Literal["trainer"]


class JoinToken(msgspec.Struct, frozen=True):
    """Permission to enter a run. Times are seconds since the Unix epoch."""

    run_id: str
    peer: str | None
    """The only peer that may use it; None: a bearer token."""
    role: Role
    not_before: float
    expires: float
    serial: bytes
    """8 random bytes; a ban of the token names them."""


class BanList(msgspec.Struct, frozen=True):
    """All bans of a run. A list with a higher `serial` replaces the one before."""

    run_id: str
    serial: int
    peers: frozenset[str] = frozenset()
    tokens: frozenset[bytes] = frozenset()


def issue_token(authority: Identity, run_id: str, now: float, valid_s: float, peer: str | None = None) -> Signed:
    """Return a token signed by the authority; a bearer token unless `peer` is given."""
    token = JoinToken(run_id, peer, "trainer", now, now + valid_s, secrets.token_bytes(8))
    return sign_body(authority, _TOKEN_KIND, token)


def sign_bans(authority: Identity, bans: BanList) -> Signed:
    """Return the ban list signed by the authority."""
    return sign_body(authority, _BANS_KIND, bans)


def open_bans(signed: Signed, manifest: AnyManifest) -> BanList:
    """Check and return a ban list from a peer; ProtocolViolation if it is not the authority's for this run."""
    bans = open_body(signed, _BANS_KIND, BanList, signer=manifest.authority)
    if bans.run_id != manifest.run_id:
        raise ProtocolViolation(f"this ban list is for run {bans.run_id}, not for {manifest.run_id}")
    if len(bans.peers) + len(bans.tokens) > BANS_MAX:
        raise ProtocolViolation(f"this ban list has more than {BANS_MAX} entries")
    return bans


def admit(manifest: AnyManifest, token: Signed | None, peer_id: str, now: float, bans: BanList | None = None) -> None:
    """Raise NotAdmitted, with reason and remedy, unless `peer_id` may take part at time `now`.

    The authority needs no token. Check protocol version and run id (`swarm.run.manifest`) before this.
    """
    if bans is not None and peer_id in bans.peers:
        raise NotAdmitted(f"peer {peer_id} is banned from this run: write to the owner of the run")
    if manifest.open or peer_id == manifest.authority:
        return
    if token is None:
        raise NotAdmitted("this run is by invitation and the invite carries no token: ask the owner of the run for one")
    opened = _open_token(manifest, token)
    if opened.run_id != manifest.run_id:
        raise NotAdmitted(f"the token is for run {opened.run_id}, not for {manifest.run_id}: {_REMEDY}")
    if opened.peer is not None and opened.peer != peer_id:
        raise NotAdmitted(
            f"the token was made out to peer {opened.peer}, not to {peer_id}:"
            " join with the --home it was made for, or ask for a token of your own"
        )
    if bans is not None and opened.serial in bans.tokens:
        raise NotAdmitted(f"the token has been withdrawn: {_REMEDY}")
    if now > opened.expires + CLOCK_SKEW_S:
        raise NotAdmitted(f"the token expired {_ago(now - opened.expires)} ago: {_REMEDY}")
    if now < opened.not_before - CLOCK_SKEW_S:
        raise NotAdmitted(
            f"the token becomes valid in {_ago(opened.not_before - now)}: wait until then, or set this machine's clock"
        )


def _open_token(manifest: AnyManifest, token: Signed) -> JoinToken:
    if token.signer != manifest.authority:
        raise NotAdmitted(f"the token is signed by {token.signer}, a stranger to this run: {_REMEDY}")
    try:
        return open_body(token, _TOKEN_KIND, JoinToken)
    except ProtocolViolation as error:
        raise NotAdmitted(f"the token is forged or damaged: {_REMEDY}") from error


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
