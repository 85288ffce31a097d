"""Heartbeat: finds watched peers that are dead or frozen.

Each watched peer is pinged every few seconds, and any byte from it counts as a sign of life. A peer becomes suspect
at once when its connection is lost and a redial fails, or after `suspect_after_s` of silence. Its connections are then
dropped, so that calls stuck on them end. It recovers when it answers again.

Time in which our own event loop did not run (stopped, or starved of CPU) does not count as a peer's silence.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Final

import trio

from peer.catalogue.groups import PeerRecovered, PeerSuspect
from peer.errors import DeadlineExceeded, NetworkError, ProtocolViolation, RemoteError
from peer.events import EventLog
from peer.net.connections import Connections
from peer.net.limits import NetLimits
from peer.net.method import Call, Empty, Method
from peer.net.rate_limit import Meter
from peer.net.rpc import Rpc
from peer.notifier import Notifier

PING: Final = Method("net/ping", Empty, Empty, access="open", urgent=True)
_TICK_S: Final = 0.25
_REDIAL_S: Final = 3.0
_STANDSTILL_S: Final = 0.5
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # runs on while the machine sleeps


class LagMeter:
    """How long our own event loop has been frozen: stopped, starved, or the machine asleep."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._due = math.inf
        self._stood_still_until = -math.inf

    @property
    def lost_s(self) -> float:
        """Seconds by which regular ticks came late, since the start. Includes a tick that is overdue now."""
        return self._lost + self._late_s

    @property
    def stood_still_until(self) -> float:
        """When the loop was last frozen for half a second or more, in trio's time. That may be now."""
        return trio.current_time() if self._late_s >= _STANDSTILL_S else self._stood_still_until

    @property
    def _late_s(self) -> float:
        return max(0.0, _clock() - self._due)

    async def run(self) -> None:
        while True:
            self._due = _clock() + _TICK_S
            await trio.sleep(_TICK_S)
            self._stood_still_until = self.stood_still_until
            self._lost += self._late_s


def _clock() -> float:
    return time.clock_gettime(_CLOCK)


class Heartbeat:
    """Watches a set of peers, which may change at any time."""

    def __init__(self, rpc: Rpc, connections: Connections, meter: Meter, limits: NetLimits, events: EventLog) -> None:
        self._rpc = rpc
        self._connections = connections
        self._meter = meter
        self._limits = limits
        self._events = events
        self._lag = LagMeter()
        self._watched: dict[str, trio.CancelScope] = {}
        self._suspects: set[str] = set()
        self._changed = Notifier()
        self._nursery: trio.Nursery | None = None
        rpc.register(PING, self._on_ping)

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset(self._suspects)

    @property
    def stood_still_until(self) -> float:
        """When our own event loop was last frozen (see `LagMeter`)."""
        return self._lag.stood_still_until

    async def wait_suspect(self, peer: str) -> None:
        """Return at once if `peer` is suspect, else when it becomes so."""
        while peer not in self._suspects:
            await self._changed.wait()

    def watch(self, peers: frozenset[str]) -> None:
        """Watch exactly `peers`. A peer that was watched before keeps its state."""
        for peer in set(self._watched) - peers:
            self._watched.pop(peer).cancel()
            self._suspects.discard(peer)
        for peer in peers - set(self._watched):
            self._watched[peer] = trio.CancelScope()
            if self._nursery is not None:
                self._nursery.start_soon(self._watch, peer, self._watched[peer])

    async def ping(self, peer: str, timeout_s: float) -> bool:
        """Return whether a peer, watched or not, gives a sign of life within that time."""
        try:
            await self._ping(peer, timeout_s)
        except NetworkError:
            return False
        return True

    async def _ping(self, peer: str, timeout_s: float) -> None:
        """Return once a peer answers. Raises NetworkError."""
        # It may answer badly (too busy): rpc has recorded a violation.
        with suppress(RemoteError, ProtocolViolation):
            await self._rpc.call(peer, PING, Empty(), timeout_s=timeout_s)

    async def run(self) -> None:
        """Ping until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._lag.run)
            for peer, scope in self._watched.items():
                nursery.start_soon(self._watch, peer, scope)
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None  # the host may be in use for a moment longer

    async def _watch(self, peer: str, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                began = trio.current_time()
                if await self._answers(peer):
                    self._recover(peer)
                else:
                    await self._suspect(peer)
                await trio.sleep_until(began + self._limits.ping_interval_s)

    async def _answers(self, peer: str) -> bool:
        """Return whether `peer` gives a sign of life in time; after a lost connection on a new one, which a dead
        process refuses at once."""
        limits, redials = self._limits, False
        quiet_s = _REDIAL_S if peer in self._suspects else limits.suspect_after_s - limits.ping_interval_s / 2
        while True:
            began, lost = trio.current_time(), self._lag.lost_s
            try:
                await self._ping(peer, quiet_s)
                return True
            except DeadlineExceeded:
                if not redials and self._meter.traffic(peer).heard_at >= began:
                    return True  # busy sending us a payload
                if not self._slept_since(lost):
                    return False
            except NetworkError:
                if redials:
                    return False
                redials, quiet_s = True, _REDIAL_S

    def _slept_since(self, lost_s: float) -> bool:
        """Return whether our own loop missed a deadline that began when the loop had lost `lost_s`."""
        return self._lag.lost_s - lost_s >= self._limits.ping_interval_s / 2

    async def _suspect(self, peer: str) -> None:
        if peer not in self._suspects:
            self._suspects.add(peer)
            self._announce()
            self._events.emit(PeerSuspect(peer=peer))
        await self._connections.abort(peer)

    def _recover(self, peer: str) -> None:
        if peer in self._suspects:
            self._suspects.discard(peer)
            self._announce()
            self._events.emit(PeerRecovered(peer=peer))

    def _announce(self) -> None:
        self._changed.notify()

    async def _on_ping(self, call: Call[Empty]) -> Empty:
        return Empty()
