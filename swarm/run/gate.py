"""Access control at one peer: which peers may call its methods, and how two peers introduce themselves.

In an open run every peer may call that is not banned. In an invitation-only run two peers first exchange credentials,
in one call (`run.enter`) that serves both directions. A peer that restarted has forgotten which peers it admitted and
answers `NotAdmitted`. The caller then introduces itself again (`Rpc.introduce`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Signed
from peer.net.rpc import Call, Method, Rpc
from swarm.run.credentials import BanList, admit, open_bans
from swarm.run.manifest import PROTOCOL_VERSION, AnyManifest, check_protocol, check_run


class Credentials(msgspec.Struct, frozen=True):
    """What a peer shows to be admitted, and the newest ban list it knows, so that bans spread with introductions."""

    run_id: str
    protocol: int = PROTOCOL_VERSION
    token: Signed | None = None
    bans: Signed | None = None


ENTER: Final = Method("run.enter", Credentials, Credentials, access="open")


async def enter(rpc: Rpc, peer: str, credentials: Credentials, timeout_s: float) -> Credentials:
    """Show credentials to `peer` and return its own, unchecked. RemoteError (code NotAdmitted) if it refuses them."""
    reply = await rpc.call(peer, ENTER, credentials, timeout_s=timeout_s)
    return reply.body


class Gate:
    """Guards `rpc` for the run or served model of `manifest`."""

    def __init__(
        self, rpc: Rpc, manifest: AnyManifest, token: Signed | None, clock: Callable[[], float] = time.time
    ) -> None:
        """`token`: what this peer shows to others. `clock` returns Unix seconds."""
        self._rpc = rpc
        self._manifest = manifest
        self._token = token
        self._clock = clock
        self._bans: BanList | None = None
        self._signed_bans: Signed | None = None
        rpc.register(ENTER, self._enter)
        self._standing = rpc.standing
        self._standing.guard()
        rpc.introduce = self.introduce

    @property
    def bans(self) -> BanList | None:
        """The newest ban list seen."""
        return self._bans

    async def introduce(self, peer: str, timeout_s: float) -> None:
        """Show this peer's credentials to `peer` and check its own.

        Raises ProtocolViolation if those are not valid, RemoteError (code NotAdmitted) if `peer` refuses ours, and
        what any call raises.
        """
        shown = await enter(self._rpc, peer, self._credentials, timeout_s)
        try:
            self._admit(peer, shown)
        except NotAdmitted as error:
            raise ProtocolViolation(f"{peer} answers for this run without being admitted: {error}") from error

    def learn_bans(self, signed: Signed) -> None:
        """Take over a newer ban list, effective at once. ProtocolViolation if it is forged."""
        if signed == self._signed_bans:
            return
        bans = open_bans(signed, self._manifest)
        if self._bans is None or bans.serial > self._bans.serial:
            self._bans, self._signed_bans = bans, signed
            self._standing.bar(bans.peers)
            for peer in self._standing.admitted:
                self._standing.revoke(peer)  # every peer shows its token again: it may be banned now

    @property
    def _credentials(self) -> Credentials:
        return Credentials(self._manifest.run_id, token=self._token, bans=self._signed_bans)

    async def _enter(self, call: Call[Credentials]) -> Credentials:
        self._admit(call.peer, call.body)
        return self._credentials

    def _admit(self, peer: str, shown: Credentials) -> None:
        check_protocol(shown.protocol)
        check_run(self._manifest, shown.run_id)
        if shown.bans is not None:
            try:
                self.learn_bans(shown.bans)
            except ProtocolViolation as error:
                raise NotAdmitted(f"{peer} showed a ban list that is not the authority's: {error}") from error
        admit(self._manifest, shown.token, peer, self._clock(), self._bans)
        self._standing.grant(peer, "member", trusted=not self._manifest.open)
