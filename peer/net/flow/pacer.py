"""Paces a host's bulk connections while it uses flows. The kernel holds the pace (Linux); elsewhere nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

import trio

from peer.net.bulk.tls import TlsSocket
from peer.net.flow.flow import BEAT_S, Flow
from peer.net.flow.pacing import FlowPace

IDLE_S: Final = 1.0  # between looks while no flow is used


class Pacer:
    """Gives each connection its share of the lowest pace that a flow in use asks for."""

    def __init__(self, flows: Callable[[], Iterable[Flow]], sockets: Callable[[], Iterable[TlsSocket]]) -> None:
        self._flows, self._sockets = flows, sockets
        self._paces: dict[Flow, FlowPace] = {}
        self._acked: dict[TlsSocket, int] = {}
        self._lately: dict[TlsSocket, float] = {}
        """Smoothed bytes a look, of connections that have passed any since the last."""
        self._bytes = 0
        self._rate = inf

    async def run(self) -> None:
        """FlowPace until cancelled."""
        while True:
            pause_s = BEAT_S if self._step() else IDLE_S
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
