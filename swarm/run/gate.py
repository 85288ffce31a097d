"""The door of a run at one peer: who may call its methods, and how two peers introduce themselves to each other.

In an open run everybody may call who is not banned. In an invitation-only run each pair of peers first exchanges its
credentials, one call (`run.enter`) that serves both directions; a peer that restarted has forgotten whom it let in and
answers `NotAdmitted`, upon which the caller introduces itself again (`Rpc.introduce`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Signed
from peer.net.rpc import Call, Method, Rpc
from swarm.run.credentials import BanList, admit, open_bans
from swarm.run.manifest import PROTOCOL_VERSION, Manifest, check_protocol, check_run

GUESTS_MAX: Final = 8192  # forgetting the oldest costs it one call


class Credentials(msgspec.Struct, frozen=True):
    """Who asks to be let in, and the newest ban list it knows of (so that bans spread with every introduction)."""

    run_id: str
    protocol: int = PROTOCOL_VERSION
    token: Signed | None = None
    bans: Signed | None = None


ENTER: Final = Method("run.enter", Credentials, Credentials, open=True)


async def enter(rpc: Rpc, peer: str, credentials: Credentials, timeout_s: float) -> Credentials:
    """Show credentials to `peer` and return its own, unchecked. RemoteError (code NotAdmitted) if it refuses us."""
    reply = await rpc.call(peer, ENTER, credentials, timeout_s=timeout_s)
    return reply.body


class Gate:
    """Guards `rpc` for the run of `manifest`; `token` is what this peer shows to others. `clock` gives Unix seconds."""

    def __init__(
        self, rpc: Rpc, manifest: Manifest, token: Signed | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._rpc = rpc
        self._manifest = manifest
        self._token = token
        self._clock = clock
        self._guests: OrderedDict[str, None] = OrderedDict()
        self._bans: BanList | None = None
        self._signed_bans: Signed | None = None
        rpc.register(ENTER, self._enter)
        rpc.gate = self.check
        rpc.introduce = self.introduce

    @property
    def bans(self) -> BanList | None:
        """The newest ban list seen."""
        return self._bans

    def check(self, peer: str, method: Method[Any, Any]) -> None:
        """NotAdmitted unless `peer` may call us. `Rpc` does not ask for methods that are open to all."""
        if self._bans is not None and peer in self._bans.peers:
            raise NotAdmitted(f"peer {peer} is banned from this run: write to whoever runs it.")
        if not self._manifest.run.open and peer not in self._guests:
            raise NotAdmitted(f"{method.name} is for members of the run: introduce yourself with {ENTER.name} first.")

    async def introduce(self, peer: str, timeout_s: float) -> None:
        """Show our credentials to `peer` and check its own. ProtocolViolation if they are no good, RemoteError (code
        NotAdmitted) if it refuses ours, and what any call raises."""
        shown = await enter(self._rpc, peer, self._credentials, timeout_s)
        try:
            self._let_in(peer, shown)
        except NotAdmitted as error:
            raise ProtocolViolation(f"{peer} answers for this run without being admitted: {error}") from error

    def learn_bans(self, signed: Signed) -> None:
        """Take over a ban list newer than ours; whoever it names is out at once. ProtocolViolation if it is forged."""
        if signed == self._signed_bans:
            return
        bans = open_bans(signed, self._manifest)
        if self._bans is None or bans.serial > self._bans.serial:
            self._bans, self._signed_bans = bans, signed
            self._guests.clear()  # everybody shows a token again: it may be a banned one

    @property
    def _credentials(self) -> Credentials:
        return Credentials(self._manifest.run_id, token=self._token, bans=self._signed_bans)

    async def _enter(self, call: Call[Credentials]) -> Credentials:
        self._let_in(call.peer, call.body)
        return self._credentials

    def _let_in(self, peer: str, shown: Credentials) -> None:
        check_protocol(shown.protocol)
        check_run(self._manifest, shown.run_id)
        if shown.bans is not None:
            try:
                self.learn_bans(shown.bans)
            except ProtocolViolation as error:
                raise NotAdmitted(f"{peer} showed a ban list that is not the authority's: {error}") from error
        admit(self._manifest, shown.token, peer, self._clock(), self._bans)
        self._guests[peer] = None
        self._guests.move_to_end(peer)
        while len(self._guests) > GUESTS_MAX:
            self._guests.popitem(last=False)
