"""Inbound connections: few unfinished handshakes, fair shares of the rest, and every slot freed at the end.

Stock 0.8.1 accepts 250 inbound connections in its lifetime, not at a time, because each keeps its slot until the host
ends (hole 4). And 300 idle sockets from one address fill those slots, so that no other peer gets in. Here an unfinished
handshake holds no slot. Few are allowed, and few from one address; the oldest gives way to the newest. An honest
handshake takes milliseconds, so this ends the idle ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm

logger = logging.getLogger(__name__)

HANDSHAKES_MAX: Final = 128
HANDSHAKES_PER_IP_MAX: Final = 16
INBOUND_SHARE: Final = 0.8  # of all connections: the rest stays free for the peers we dial
PER_IP_SHARE: Final = 0.5  # many peers may share one NAT, but may not take all connections

_BROKEN: Final = (BaseLibp2pError, OSError, EOFError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError)


def apply() -> None:
    """Admit inbound connections through `InboundGate`."""
    gates: WeakKeyDictionary[Swarm, InboundGate] = WeakKeyDictionary()

    async def handle_inbound(self: Swarm, read_write_closer: Any, maddr: Any) -> None:
        gate = gates.get(self)
        if gate is None:
            gate = gates[self] = InboundGate(self)
        await gate.handle(read_write_closer, maddr)

    Swarm._handle_inbound_connection = handle_inbound  # type: ignore[method-assign]


class InboundGate:
    """Admission of one swarm's inbound connections, from the accepted socket to the end of the connection."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._handshakes: dict[str, list[trio.CancelScope]] = {}  # per address, oldest first
        self._open: Counter[str] = Counter()  # finished handshakes, per address

    async def handle(self, stream: Any, maddr: Any) -> None:
        """Handle one accepted socket. Returns when its connection is over; the listener then closes the socket."""
        remote = stream.get_remote_address()
        ip = remote[0] if remote is not None else ""
        multiaddr = self._swarm._build_remote_multiaddr(stream)
        if multiaddr is not None and not await self._swarm.connection_gate.is_allowed(multiaddr):
            return
        muxed = None
        with self._handshake(ip):
            try:
                muxed = await self._swarm.upgrade_inbound_raw_conn(RawConnection(stream, False), maddr)
            except _BROKEN as error:
                logger.debug("inbound connection from %s failed: %r", ip, error)
        if muxed is None:
            return
        self._open[ip] += 1
        try:
            if self._is_over_share(ip):
                logger.debug("inbound connection from %s refused: its share is used up", ip)
                await muxed.close()
            else:
                self._trim(muxed)
                await muxed.event_closed.wait()  # type: ignore[attr-defined]
        finally:
            self._open[ip] -= 1
            if not self._open[ip]:
                del self._open[ip]

    @contextmanager
    def _handshake(self, ip: str) -> Iterator[None]:
        """Count as an unfinished handshake inside the block. A newer one may cancel it."""
        mine = self._handshakes.setdefault(ip, [])
        if len(mine) >= HANDSHAKES_PER_IP_MAX:
            mine.pop(0).cancel()
        elif sum(map(len, self._handshakes.values())) >= HANDSHAKES_MAX:
            max(self._handshakes.values(), key=len).pop(0).cancel()
        with trio.CancelScope() as scope:
            mine.append(scope)
            try:
                yield
            finally:
                if scope in mine:
                    mine.remove(scope)
                if not mine and self._handshakes.get(ip) is mine:
                    del self._handshakes[ip]

    def _is_over_share(self, ip: str) -> bool:
        most = self._swarm.connection_config.max_connections
        return self._open.total() > most * INBOUND_SHARE or self._open[ip] > most * PER_IP_SHARE

    def _trim(self, newest: Any) -> None:
        """Close a peer's oldest inbound connections above its limit: after a crash they are the dead ones."""
        live = [
            conn
            for conn in self._swarm.get_connections(newest.peer_id)
            if not conn.is_closed and not conn.muxed_conn.is_initiator
        ]
        for conn in live[: max(0, len(live) - self._swarm.connection_config.max_connections_per_peer)]:
            conn.muxed_conn.abort()  # type: ignore[attr-defined]
