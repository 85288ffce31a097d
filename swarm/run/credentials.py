"""Who may take part in a run: join tokens and bans, both signed by the run's authority.

An open run lets everybody in. An invitation-only run wants a token, of one of two kinds:

- *bound* to one peer id: of no use to anybody else, so it may be sent over any channel;
- *bearer* (no peer id): whoever holds it may join until it expires. It is what an invite carries by default.

Every member checks tokens by itself with nothing but the manifest, so peers can join while the authority is away. A
token says who may *enter*; a ban ends a peer's stay, and the ban of a token that of all who came with it
(docs/security.md).
"""

from __future__ import annotations

import secrets
from typing import Final, Literal

import msgspec

from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, open_body, sign_body
from swarm.run.manifest import Manifest

TOKEN_DAYS: Final = 30
CLOCK_SKEW_S: Final = 120.0  # strangers' clocks: a token is honoured this much before and after its time
BANS_MAX: Final = 4096

_TOKEN_KIND: Final = "join-token"
_BANS_KIND: Final = "bans"
_REMEDY: Final = "ask whoever invited you for a new invite"
Role = Literal["trainer"]


class JoinToken(msgspec.Struct, frozen=True):
    """Permission to enter run `run_id` between `not_before` and `expires` (seconds since the Unix epoch). `peer` None
    makes it a bearer token. `serial` (8 random bytes) is what a ban of the token names."""

    run_id: str
    peer: str | None
    role: Role
    not_before: float
    expires: float
    serial: bytes


class BanList(msgspec.Struct, frozen=True):
    """All bans of a run; a list with a higher `serial` replaces the one before."""

    run_id: str
    serial: int
    peers: frozenset[str] = frozenset()
    tokens: frozenset[bytes] = frozenset()


def issue_token(authority: Identity, run_id: str, now: float, valid_s: float, peer: str | None = None) -> Signed:
    """A token the authority signs; a bearer token unless `peer` is given."""
    token = JoinToken(run_id, peer, "trainer", now, now + valid_s, secrets.token_bytes(8))
    return sign_body(authority, _TOKEN_KIND, token)


def sign_bans(authority: Identity, bans: BanList) -> Signed:
    return sign_body(authority, _BANS_KIND, bans)


def open_bans(signed: Signed, manifest: Manifest) -> BanList:
    """Check a ban list that a peer handed over; ProtocolViolation if it is not the authority's for this run."""
    bans = open_body(signed, _BANS_KIND, BanList, signer=manifest.authority)
    if bans.run_id != manifest.run_id:
        raise ProtocolViolation(f"this ban list is for run {bans.run_id}, not for {manifest.run_id}")
    if len(bans.peers) + len(bans.tokens) > BANS_MAX:
        raise ProtocolViolation(f"this ban list has more than {BANS_MAX} entries")
    return bans


def admit(manifest: Manifest, token: Signed | None, peer_id: str, now: float, bans: BanList | None = None) -> None:
    """Return if `peer_id` may take part at time `now`; otherwise NotAdmitted says why not, and what helps.

    The authority itself needs no token. Check protocol version and run id (`swarm.run.manifest`) before this.
    """
    if bans is not None and peer_id in bans.peers:
        raise NotAdmitted(f"peer {peer_id} is banned from this run: write to whoever runs it.")
    if manifest.run.open or peer_id == manifest.authority:
        return
    if token is None:
        raise NotAdmitted("this run is by invitation and the invite carries no token: ask whoever runs it for one.")
    opened = _open_token(manifest, token)
    if opened.run_id != manifest.run_id:
        raise NotAdmitted(f"the token is for run {opened.run_id}, not for {manifest.run_id}: {_REMEDY}.")
    if opened.peer is not None and opened.peer != peer_id:
        raise NotAdmitted(
            f"the token was made out to peer {opened.peer}, not to {peer_id}:"
            " join with the --home it was made for, or ask for a token of your own."
        )
    if bans is not None and opened.serial in bans.tokens:
        raise NotAdmitted(f"the token has been withdrawn: {_REMEDY}.")
    if now > opened.expires + CLOCK_SKEW_S:
        raise NotAdmitted(f"the token expired {_ago(now - opened.expires)} ago: {_REMEDY}.")
    if now < opened.not_before - CLOCK_SKEW_S:
        raise NotAdmitted(
            f"the token becomes valid in {_ago(opened.not_before - now)}: wait until then, or set this machine's clock."
        )


def token_expiry(manifest: Manifest, token: Signed) -> float:
    """When a token stops letting peers in; NotAdmitted if it is not the authority's."""
    return _open_token(manifest, token).expires


def _open_token(manifest: Manifest, token: Signed) -> JoinToken:
    if token.signer != manifest.authority:
        raise NotAdmitted(f"the token is signed by {token.signer}, a stranger to this run: {_REMEDY}.")
    try:
        return open_body(token, _TOKEN_KIND, JoinToken)
    except ProtocolViolation as error:
        raise NotAdmitted(f"the token is forged or damaged: {_REMEDY}.") from error


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
