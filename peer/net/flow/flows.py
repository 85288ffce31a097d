"""The flows of one host: at most one that it has opened to each peer, and those that others have opened.

A flow has a TLS connection of its own, so that no message waits behind a payload. Where none can be made (NAT, a
relay), it runs over a libp2p stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import Final

import trio

from peer.errors import ConnectionLost
from peer.net.bulk.tls import TlsSocket
from peer.net.flow.flow import BEAT_S, Flow, FlowHandler, FlowParts, FlowWire
from peer.net.flow.pacing import FlowPace
from peer.net.strangers.shares import SharedSlots

FLOWS_MAX: Final = 512  # of those that others have opened: shared by address prefix, and members go before clients
FLOWS_PER_PEER_MAX: Final = 4  # one each way, and those that we do not know yet to have ended
IDLE_S: Final = 60.0
LOOK_S: Final = IDLE_S / 4
ACCEPTED_IDLE_S: Final = 2 * IDLE_S  # the opener closes first, so that it never uses one that we are closing
UNUSED_S: Final = 1.0  # between the pacer's looks while no flow is used


class Flows:
    """Opens, accepts and keeps flows. `dial(peer)` returns a connection for one; raises as calls do. `paced()` returns
    the connections that give way to flows in use."""

    def __init__(
        self,
        nursery: trio.Nursery,
        dial: Callable[[str], Awaitable[FlowWire]],
        parts: FlowParts,
        paced: Callable[[], Iterable[TlsSocket]],
    ) -> None:
        self._nursery, self._dial, self._parts = nursery, dial, parts
        self._handler: FlowHandler | None = None
        self._opened: dict[str, Flow] = {}
        self._all: set[Flow] = set()
        self._accepted = SharedSlots[Flow](FLOWS_MAX, _last_used, lambda flow: flow.is_member)
        self._dials: dict[str, trio.Event] = {}
        self._pacer = Pacer(lambda: self._all, paced)

    @property
    def served(self) -> bool:
        """Whether this host takes flows."""
        return self._handler is not None

    def serve(self, handler: FlowHandler | None) -> None:
        """Take flows from now on, or no longer; those that are open end."""
        for flow in tuple(self._all):
            flow.close("this peer serves something else now")
        self._handler = handler

    async def open(self, peer: str) -> Flow:
        """Return an open flow with a peer, opening one if need be. Raises DialError, ConnectionLost or RemoteError."""
        while True:
            known = self._known(peer)
            if known is not None:
                return known
            if peer not in self._dials:
                break
            await self._dials[peer].wait()
        if self._handler is None:
            raise ConnectionLost("this peer uses no flows")
        dialled = self._dials[peer] = trio.Event()
        try:
            flow = Flow(peer, await self._dial(peer), self._handler, self._parts)
            self._opened[peer] = flow
            self._all.add(flow)
            self._nursery.start_soon(self._run, flow)
            return flow
        finally:
            del self._dials[peer]
            dialled.set()

    def _known(self, peer: str) -> Flow | None:
        """Return the open flow with a peer, one of our own if there is one."""
        mine = self._opened.get(peer)
        if mine is not None and mine.is_open:
            return mine
        return next((flow for flow in self._all if flow.peer == peer and flow.is_open), None)

    async def accept(self, peer: str, wire: FlowWire) -> None:
        """Serve a flow that a peer has opened, until it ends."""
        crowded = sum(flow.peer == peer for flow in self._all) >= FLOWS_PER_PEER_MAX
        if self._handler is None or crowded or not self._parts.admissions.allows(peer, "client"):
            wire.close()
            return
        flow = Flow(peer, wire, self._handler, self._parts)
        loser = self._accepted.add(flow, peer, flow.prefix)
        if loser is flow:
            wire.close()
            return
        if loser is not None:
            loser.close("another peer needs its place")
        self._all.add(flow)
        await self._run(flow)

    async def _run(self, flow: Flow) -> None:
        try:
            await flow.run()
        finally:
            flow.close("this peer closes it")
            self._all.discard(flow)
            self._accepted.remove(flow)
            if self._opened.get(flow.peer) is flow:
                del self._opened[flow.peer]

    async def end_if_dead(self, flow: Flow, silent_s: float, answer_s: float) -> None:
        """End a flow that has been silent for this long, unless its peer answers a ping in time."""
        if flow.silent_s > silent_s and not await self._parts.ping(flow.peer, answer_s) and flow.silent_s > silent_s:
            flow.close("it does not answer")

    async def run(self) -> None:
        """Close idle flows and those of peers without rights, and pace what is in front of others, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pacer.run)
            await self._tidy()

    async def _tidy(self) -> None:
        while True:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            for flow in tuple(self._all):
                flow.end_without_rights()
                idle_s = IDLE_S if self._opened.get(flow.peer) is flow else ACCEPTED_IDLE_S
                if flow.idle_since is not None and now - flow.idle_since > idle_s:
                    flow.close("it was idle")

    def close(self) -> None:
        """End all flows."""
        for flow in tuple(self._all):
            flow.close("this peer ends")


def _last_used(flow: Flow) -> float:
    return inf if flow.idle_since is None else flow.idle_since


class Pacer:
    """Gives each bulk connection its share of the lowest pace that a flow in use asks for. The kernel holds the pace
    (Linux); elsewhere nothing happens."""

    def __init__(self, flows: Callable[[], Iterable[Flow]], sockets: Callable[[], Iterable[TlsSocket]]) -> None:
        self._flows, self._sockets = flows, sockets
        self._paces: dict[Flow, FlowPace] = {}
        self._acked: dict[TlsSocket, int] = {}
        self._lately: dict[TlsSocket, float] = {}
        """Smoothed bytes a look, of connections that have passed any since the last."""
        self._bytes = 0
        self._rate = inf

    async def run(self) -> None:
        """Pace until cancelled."""
        while True:
            pause_s = BEAT_S if self._step() else UNUSED_S
            await trio.sleep(pause_s)

    def _step(self) -> bool:
        """Set the paces; return whether a flow is in use."""
        flows = tuple(self._flows())
        used = [flow for flow in flows if flow.idle_since is None]
        self._paces = {flow: self._paces.get(flow) or FlowPace() for flow in flows}
        if not used and self._rate == inf:
            return False
        self._count()
        now = trio.current_time()
        rates = [self._paces[flow].step(now, tuple(flow.round_trips), self._bytes) for flow in used]
        self._set(min(rates, default=inf))
        return bool(used)

    def _count(self) -> None:
        """Count what the connections have passed."""
        seen = {socket: socket.acked_bytes() for socket in self._sockets()}
        new = {socket: max(0, acked - self._acked.get(socket, acked)) for socket, acked in seen.items()}
        self._lately = {one: (self._lately.get(one, 0.0) + count) / 2 for one, count in new.items() if count}
        self._bytes += sum(new.values())
        self._acked = seen

    def _set(self, rate: float) -> None:
        if rate == inf and self._rate == inf:
            return
        self._rate = rate
        total = sum(self._lately.values())
        for socket in self._acked:
            # Connections that send share the pace. Others may begin at all of it, and share it from the next look on.
            part = max(1 / len(self._lately), self._lately[socket] / total) if socket in self._lately else 1.0
            socket.pace(rate * part)
