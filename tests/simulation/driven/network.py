"""Calls between hosts in one process: late, lost, doubled, cut off, and ended by a crash of either side."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from peer.errors import ConnectionLost, DeadlineExceeded, DialError, NetworkError, RemoteError
from peer.events import EventLog, PenaltyLog
from peer.net.admissions import Admissions
from peer.net.limits import NetLimits
from peer.net.method import Call, Method, Reply
from peer.net.rpc_server import Outcome, RpcServer, flat
from swarm.rounds.messages import AGREE
from tests.simulation.driven.virtual import virtual_time

if TYPE_CHECKING:
    from tests.simulation.driven.machine import DrivenMachine
    from tests.simulation.driven.world import DrivenWorld

LOST_S = 1.0  # after which a broken connection is noticed, if it is before the call's deadline


class MemoryHost:
    """One process's host, as far as rounds need one."""

    def __init__(self, world: DrivenWorld, machine: DrivenMachine) -> None:
        self.peer_id = machine.peer
        self.identity = SimpleNamespace(peer_id=machine.peer)
        self.events = EventLog()
        self.admissions = Admissions()
        self.rpc = MemoryRpc(world, machine, self.events, self.admissions)
        self.addresses: tuple[str, ...] = ()
        self._machine = machine

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset(self._machine.suspects)

    @property
    def connected(self) -> frozenset[str]:
        return frozenset()

    def remote_ip(self, peer_id: str) -> None:
        return None

    def received_from(self, peer_id: str) -> tuple[int, float]:
        return 0, 0.0

    def watch(self, peers: Iterable[str], cause: str = "") -> None:
        """The world notices what a failure detector would."""


class MemoryRpc:
    """Calls and their handlers. Bodies are encoded on their way, so that no two peers share an object."""

    def __init__(self, world: DrivenWorld, machine: DrivenMachine, events: EventLog, admissions: Admissions) -> None:
        self._world, self._machine, self._life = world, machine, machine.life
        no_meter: Any = None
        self.server = RpcServer(NetLimits(), no_meter, events, admissions)
        self.server._penalties = PenaltyLog(events, admissions.is_trusted, virtual_time)
        self.register = self.server.add
        self._answering: set[trio.CancelScope] = set()
        self._ended = False

    def end(self) -> None:
        """The process ends: so do its handlers."""
        self._ended = True
        for scope in self._answering:
            scope.cancel()

    async def call(
        self,
        peer: str,
        method: Method[Any, Any],
        body: Any,
        payload: Any = b"",
        *,
        timeout_s: float,
        bulk: bool = False,
    ) -> Reply[Any]:
        with trio.move_on_after(timeout_s):
            await self._machine.awake()
            if self._ended:
                await trio.sleep_forever()
            self._world.covered[f"call {method.name}"] += 1
            return await self._carry(peer, method, *self._said(peer, method, body, bytes(flat(payload))))
        raise DeadlineExceeded(f"{peer} did not answer {method.name} within {timeout_s:g} s")

    def _said(self, peer: str, method: Method[Any, Any], body: Any, payload: bytes) -> tuple[bytes, bytes]:
        """Return the body and payload of a call: a liar's may be others than its driver's."""
        liar, true = self._machine.liar, (msgspec.msgpack.encode(body), payload)
        if liar is None:
            return true
        changed, payload = liar.calls(peer, method, body, payload, self._machine.slices)
        said = msgspec.msgpack.encode(changed), payload
        if said != true:
            liar.note_call(method, *said)
        return said

    async def _carry(self, peer: str, method: Method[Any, Any], encoded: bytes, payload: bytes) -> Reply[Any]:
        world, me = self._world, self._machine.peer
        ways = world.ways(me, peer, method, encoded)
        for delay in ways[1:]:
            world.tasks.start_soon(self._again, delay, peer, method, encoded, payload)
        await self._way(ways[:1], me, peer)
        outcome = await self._answered(peer, method, encoded, payload)
        await self._way(world.ways(peer, me, method, b"")[:1], peer, me)
        if outcome.code:
            raise RemoteError(outcome.code, outcome.message)
        return Reply(outcome.body, memoryview(bytearray(outcome.payload)))

    async def _way(self, delays: tuple[float, ...], source: str, target: str) -> None:
        """Let the time pass that bytes need; raise if they are lost."""
        await trio.sleep(delays[0] if delays else LOST_S)
        if not delays or self._world.network.is_cut(source, target):
            if self._world.random.random() < 0.5:
                await trio.sleep_forever()  # nothing tells the caller
            raise ConnectionLost(f"the connection of {source} to {target} broke")

    async def _again(self, delay: float, peer: str, method: Method[Any, Any], encoded: bytes, payload: bytes) -> None:
        await trio.sleep(delay)
        if not self._world.network.is_cut(self._machine.peer, peer):
            with suppress(NetworkError):
                await self._answered(peer, method, encoded, payload)

    async def _answered(self, peer: str, method: Method[Any, Any], encoded: bytes, payload: bytes) -> Outcome:
        receiver = self._world.machines[peer]
        await receiver.awake()
        if receiver.rpc is None:
            raise DialError(f"{peer} is down", "refused")
        receiver.suspects.discard(self._machine.peer)
        outcome = await receiver.rpc.answer(self._machine.peer, method, encoded, memoryview(bytearray(payload)))
        liar = self._machine.liar
        if liar is not None and (method.name, encoded, payload) in liar.altered:
            self._world.heard_lie(receiver, liar, method.name, outcome.code)
        return outcome

    async def answer(self, caller: str, method: Method[Any, Any], encoded: bytes, payload: memoryview) -> Outcome:
        """Run a handler, unless its process ends meanwhile."""
        served = self.server._methods.get(method.name)
        if served is None:
            raise RemoteError("UnknownMethod", f"{self._machine.peer} does not serve {method.name}")
        body = msgspec.msgpack.decode(encoded, type=method.request)
        if method is AGREE:
            self._world.received(self._machine, caller, body.messages)
        outcome: Outcome | None = None
        with trio.CancelScope() as scope:
            self._answering.add(scope)
            try:
                if served.check is not None:
                    refused = await self.server._handled(method, caller, served.check(caller, body, payload.nbytes))
                    outcome = refused if isinstance(refused, Outcome) else None
                if outcome is None:
                    outcome = await self.server.run(served, Call(caller, body, payload))
            finally:
                self._answering.discard(scope)
        if outcome is None or self._ended:
            raise ConnectionLost(f"{self._machine.peer} went away")
        if (liar := self._machine.liar) is not None:
            told = liar.answers(caller, method, body, bytes(outcome.payload))
            outcome = replace(outcome, payload=memoryview(told))
        return outcome
