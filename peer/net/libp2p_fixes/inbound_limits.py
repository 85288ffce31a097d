"""Inbound connections: few unfinished handshakes, fair shares of the rest, and every slot freed at the end.

Stock 0.8.1 accepts 250 inbound connections in its lifetime, not at a time, because each keeps its slot until the host
ends. And 300 idle sockets from one address fill those slots, so that no other peer gets in. Here an unfinished
handshake holds no slot. Few are allowed, and few from one network, at a time and a second (`allowances`); the oldest
gives way to the newest. A finished one holds a slot. Strangers have few of them, and the one that was idle the longest
gives way (`shares`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.swarm import Swarm

from peer.net.admissions import Admissions
from peer.net.libp2p_fixes.yamux import Yamux
from peer.net.strangers.allowances import allowances_of, give_allowances
from peer.net.strangers.shares import Handshakes, Slots, address_group
from peer.net.strangers.turns import TurnedConnection, give_turns, turns_of

logger = logging.getLogger(__name__)

HANDSHAKES_MAX: Final = 128
HANDSHAKES_PER_GROUP_MAX: Final = 16

_BROKEN: Final = (BaseLibp2pError, OSError, EOFError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError)


def apply() -> None:
    """Admit inbound connections through `InboundGate`."""

    async def handle_inbound(self: Swarm, read_write_closer: Any, maddr: Any) -> None:
        await inbound_gate(self).handle(read_write_closer, maddr)

    Swarm._handle_inbound_connection = handle_inbound  # type: ignore[method-assign]


def inbound_gate(swarm: Any) -> InboundGate:
    """Return the gate of a swarm."""
    gate = getattr(swarm, "_inbound_gate", None)
    if gate is None:
        gate = swarm._inbound_gate = InboundGate(swarm)
    assert isinstance(gate, InboundGate)
    return gate


class InboundGate:
    """Admission of one swarm's inbound connections, from the accepted socket to the end of the connection."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.on_refused: Callable[[str], None] = lambda cap: None
        """Called when a connection is refused, or gives way, because a cap is reached, with the name of the cap."""
        self._handshakes = Handshakes(HANDSHAKES_MAX, HANDSHAKES_PER_GROUP_MAX)
        self._handshakes.on_given_way = lambda: self.on_refused("handshakes")
        self.judge_by(Admissions())

    def judge_by(self, admissions: Admissions) -> None:
        """Let strangers give way to the peers that `admissions` trusts, and have few calls."""
        most = self._swarm.connection_config.max_connections
        give_allowances(self._swarm, admissions)
        give_turns(self._swarm, admissions)
        self._slots: Slots[Yamux] = Slots(most, admissions, lambda muxed: muxed.last_used)

    def counts(self) -> dict[str, int]:
        """Return the unfinished handshakes, and the slots that are taken."""
        return {"handshakes": len(self._handshakes), "inbound": len(self._slots)}

    async def handle(self, stream: Any, maddr: Any) -> None:
        """Handle one accepted socket. Returns when its connection is over; the listener then closes the socket."""
        remote = stream.get_remote_address()
        group = address_group(remote[0] if remote is not None else "")
        if not allowances_of(self._swarm).take_connection(group):
            self.on_refused("connections a second")
            return
        if len(self._swarm.get_connections()) >= self._swarm.connection_config.max_connections:
            self.on_refused("connections")
            return
        multiaddr = self._swarm._build_remote_multiaddr(stream)
        if multiaddr is not None and not await self._swarm.connection_gate.is_allowed(multiaddr):
            return
        muxed = None
        connection = TurnedConnection(stream, turns_of(self._swarm), group)
        with self._handshakes.count(group):
            try:
                muxed = await self._swarm.upgrade_inbound_raw_conn(connection, maddr)
            except _BROKEN as error:
                logger.debug("inbound connection from %s failed: %r", group, error)
        if muxed is not None:
            connection.peer = str(muxed.peer_id)
            await self.hold(muxed, group)

    async def hold(self, muxed: Any, group: str) -> None:
        """Give a connection from `group` a slot until it ends, which may be at once. Others may end for it."""
        loser = self._slots.add(muxed, str(muxed.peer_id), group)
        if loser is not None:
            logger.debug("inbound connection of %s gives way", loser.peer_id)
            self.on_refused("inbound")
            loser.abort()
        self._trim(muxed)
        try:
            await muxed.event_closed.wait()
        finally:
            self._slots.remove(muxed)

    def _trim(self, newest: Any) -> None:
        """Close a peer's oldest inbound connections above its limit: after a crash they are the dead ones."""
        live = [
            conn
            for conn in self._swarm.get_connections(newest.peer_id)
            if not conn.is_closed and not conn.muxed_conn.is_initiator
        ]
        for conn in live[: max(0, len(live) - self._swarm.connection_config.max_connections_per_peer)]:
            self.on_refused("connections of a peer")
            conn.muxed_conn.abort()  # type: ignore[attr-defined]
