"""Turns: what strangers have us do is done when nothing else is to be done, one piece after the other.

A handshake takes a few milliseconds of our event loop, an untrusted peer's call about one. The loop serves all tasks
that can run before it looks at the network again, so fifty strangers at once held up every member for fifty such
pieces. Here each piece waits for its turn: an accepted socket, what has arrived on an inbound connection, a stream that
was opened, a call of the bulk transport. A turn comes when no task can run and nothing else has arrived, so a member
waits for one piece at most, beside any flood. It comes after `STARVED_S` in any case, since members may keep a peer
busy without end. While a connection waits nothing more is read from it, and the kernel slows its sender down.

Turns go round: between clients and peers that have proved nothing, and among each by network (`shares.address_group`).
Trusted peers wait for none, and no peer does at a host of no run.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import Any, Final

import trio
from libp2p.network.connection.raw_connection import RawConnection
from trio.testing import wait_all_tasks_blocked  # of trio itself, and only there is it public

from peer.net.admissions import Admissions
from peer.net.strangers.allowances import Remote
from peer.net.strangers.shares import address_group

STARVED_S: Final = 0.05

_Queues = OrderedDict[str, deque[trio.Event]]  # by network, the next one first


class IdleTurns:
    """The turns of all peers at one host that are not trusted. They are given while `run` runs."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions
        self._arrived = trio.Event()
        self._running = False
        self._clients: _Queues = OrderedDict()
        self._strangers: _Queues = OrderedDict()
        self._classes = deque((self._clients, self._strangers))

    async def take(self, group: str, peer: str | None = None) -> None:
        """Wait for a turn of a peer in `group`; None for `peer` if it is not yet known."""
        if not self._running or not self._admissions.guarded or (peer and self._admissions.is_trusted(peer)):
            return
        queues = self._clients if peer and self._admissions.allows(peer, "client") else self._strangers
        turn = trio.Event()
        queues.setdefault(group, deque()).append(turn)
        self._arrived.set()
        try:
            await turn.wait()
        finally:
            if not turn.is_set():
                queues[group].remove(turn)
                if not queues[group]:
                    del queues[group]

    async def take_for(self, connection: Remote) -> None:
        """Wait for a turn of the peer at the other end of a connection."""
        remote = connection.get_remote_address()
        await self.take(address_group(remote[0] if remote is not None else ""), str(connection.peer_id))

    async def run(self) -> None:
        """Give turns until cancelled; then no peer waits any more."""
        self._running = True
        try:
            while True:
                await self._arrived.wait()
                await _until_idle()
                if not self._give():
                    self._arrived = trio.Event()
        finally:
            self._running = False
            while self._give():
                pass

    def _give(self) -> bool:
        """Give the next turn. Returns False if no peer waits."""
        if not self._classes[0]:
            self._classes.rotate()
        queues = self._classes[0]
        if not queues:
            return False
        group, waiting = queues.popitem(last=False)
        waiting.popleft().set()
        if waiting:
            queues[group] = waiting
        self._classes.rotate()
        return True


class TurnedConnection(RawConnection):
    """An inbound connection. Its received data waits for its turn."""

    def __init__(self, stream: Any, turns: IdleTurns, group: str) -> None:
        super().__init__(stream, False)
        self._turns = turns
        self._group = group
        self.peer: str | None = None
        """The peer at its other end, once known."""

    async def read(self, n: int | None = None) -> bytes:
        arrived = await super().read(n)
        await self._turns.take(self._group, self.peer)
        return arrived


async def _until_idle() -> None:
    """Return when no task can run and nothing has arrived, or after `STARVED_S` of this thread's CPU time. On a machine
    that gives us little of it, strangers are no more pressing."""
    busy_since = time.thread_time()
    idle = False
    while not idle and time.thread_time() - busy_since < STARVED_S:
        with trio.move_on_after(STARVED_S) as waiting:
            await wait_all_tasks_blocked()
        idle = not waiting.cancelled_caught


def accept_in_turn(listener: trio.SocketListener, turns: IdleTurns) -> None:
    """Let each socket that a listener accepts wait for its turn. Meanwhile the kernel keeps the next ones."""
    stock = listener.accept

    async def accept() -> trio.SocketStream:
        stream = await stock()
        try:
            await turns.take(_group_of(stream))
        except BaseException:
            stream.socket.close()
            raise
        return stream

    listener.accept = accept  # type: ignore[method-assign]


def _group_of(stream: trio.SocketStream) -> str:
    try:
        return address_group(stream.socket.getpeername()[0])
    except OSError:  # it has ended already
        return ""


def turns_of(swarm: Any) -> IdleTurns:
    """Return the turns at a swarm."""
    found = swarm.__dict__.get("_turns")
    return found if isinstance(found, IdleTurns) else give_turns(swarm, Admissions())


def give_turns(swarm: Any, admissions: Admissions) -> IdleTurns:
    """Give the swarm's strangers new turns. `admissions` knows who is none."""
    swarm._turns = given = IdleTurns(admissions)
    return given
