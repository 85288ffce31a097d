"""One peer of topologies.py: a process with a host that carries out its part of plans of transfers.

    python -m benchmarks.rounds.topology_peer NUMBER IP

Prints its id and addresses, reads the whole group and connects to all. Then for each round it reads a line that names
the plan, says that it is ready, starts on the next line, and prints its figures. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import trio

from benchmarks.rounds.topology_plans import PartialSum, Plan, Vector, hash_of, plan_of, vector_of
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.method import Call, Method
from peer.net.reach import Reach

CALL_S: Final = 300.0
SENDS_PER_PEER: Final = 2  # as the product has it (`swarm.rounds.exchange.slice_exchange`)


class Carried(msgspec.Struct, frozen=True):
    """The transfer of a plan whose values are the payload. Round 0 has no plan: such a call opens a connection."""

    round: int
    transfer: int = 0


class Taken(msgspec.Struct, frozen=True):
    """The answer to `Carried`."""


CARRY: Final = Method("bench/carry", Carried, Taken, request_payload_max=256 << 20)


class PlanRun:
    """One peer's part of a plan. `peers`: the ids of all peers, by number."""

    def __init__(self, host: Host, peers: Sequence[str], number: int, plan: Plan, round: int, own: Vector) -> None:
        self._host, self._peers, self._plan, self._round = host, peers, plan, round
        self._sum = PartialSum(own)
        mine = [index for index, transfer in enumerate(plan) if transfer.sender == number]
        self._first = [index for index in mine if not plan[index].after]
        self._waits_for = {index: len(plan[index].after) for index in mine}
        self._unlocks: dict[int, list[int]] = {}
        for index in mine:
            for before in plan[index].after:
                self._unlocks.setdefault(before, []).append(index)
        self._to_send = {to: sum(plan[index].receiver == to for index in mine) for to in range(len(peers))}
        self._queues = {to: trio.open_memory_channel[int](len(plan)) for to, count in self._to_send.items() if count}
        self._to_arrive = sum(transfer.receiver == number for transfer in plan)
        self._all_arrived = trio.Event()

    async def run(self) -> Vector:
        """Send and receive everything; return the sum."""
        async with trio.open_nursery() as nursery:
            for index in self._first:
                self._enqueue(index)
            for to in self._queues:
                for _ in range(SENDS_PER_PEER):
                    nursery.start_soon(self._send_all, to)
            await self._all_arrived.wait()
        return self._sum.values

    def take(self, index: int, payload: memoryview) -> None:
        """Take what has arrived, and queue what had to wait for it."""
        self._sum.arrive(self._plan[index], np.frombuffer(payload, np.uint32))
        for after in self._unlocks.get(index, ()):
            self._waits_for[after] -= 1
            if not self._waits_for[after]:
                self._enqueue(after)
        self._to_arrive -= 1
        if not self._to_arrive:
            self._all_arrived.set()

    def _enqueue(self, index: int) -> None:
        to = self._plan[index].receiver
        self._queues[to][0].send_nowait(index)
        self._to_send[to] -= 1
        if not self._to_send[to]:
            self._queues[to][0].close()

    async def _send_all(self, to: int) -> None:
        """Send what becomes ready for one peer, in that order."""
        async for index in self._queues[to][1]:
            content = self._sum.content(self._plan[index]).data.cast("B")
            named = Carried(self._round, index)
            await self._host.rpc.call(self._peers[to], CARRY, named, content, timeout_s=CALL_S, bulk=True)


async def read_lines(lines: trio.MemorySendChannel[dict[str, Any]], everything: trio.CancelScope) -> None:
    """Read the messages of the process that started this one. Cancel everything once that has ended."""
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        await lines.send(json.loads(line))
    everything.cancel()


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


class TopologyPeer:
    """The rounds of one host, each when the process that started this one says so."""

    def __init__(self, host: Host, number: int, lines: trio.MemoryReceiveChannel[dict[str, Any]]) -> None:
        self._host, self._number, self._lines = host, number, lines
        self._peers: list[str] = []
        self._run: PlanRun | None = None
        host.rpc.register(CARRY, self._carried)

    async def _carried(self, call: Call[Carried]) -> Taken:
        await trio.lowlevel.checkpoint()
        if call.body.round:
            assert self._run is not None
            self._run.take(call.body.transfer, call.payload)
        return Taken()

    async def serve(self) -> None:
        """Connect to the group, then run a plan for every pair of lines that is read."""
        group = (await self._lines.receive())["group"]
        self._peers = [hello["peer"] for hello in group]
        for hello in group:
            self._host.book.add(hello["peer"], hello["addresses"])
        for peer in self._peers[self._number + 1 :] + self._peers[: self._number]:
            await self._host.rpc.call(peer, CARRY, Carried(0), timeout_s=CALL_S, bulk=True)
        say(ready=True)
        await self._lines.receive()
        while True:
            await self._one(await self._lines.receive())

    async def _one(self, order: dict[str, Any]) -> None:
        plan = plan_of(order["topology"], len(self._peers), order["values"], order["weights"])
        own = vector_of(order["round"], self._number, order["values"])
        run = self._run = PlanRun(self._host, self._peers, self._number, plan, order["round"], own)
        up, down = self._host.bytes_up, self._host.bytes_down
        say(ready=True)
        await self._lines.receive()
        began_s = time.monotonic()
        found = await run.run()
        ended_s = time.monotonic()
        up, down = self._host.bytes_up - up, self._host.bytes_down - down
        say(up=up, down=down, began_s=began_s, ended_s=ended_s, hash=hash_of(found))


async def main(number: int, ip: str) -> None:
    config = open_host(identity=Identity.generate(), events=EventLog(), reach=Reach((f"/ip4/{ip}/tcp/0",)))
    async with config as host, trio.open_nursery() as nursery:
        send, lines = trio.open_memory_channel[dict[str, Any]](1)
        peer = TopologyPeer(host, number, lines)
        nursery.start_soon(read_lines, send, nursery.cancel_scope)
        say(peer=host.peer_id, addresses=host.addresses)
        await peer.serve()


if __name__ == "__main__":
    trio.run(partial(main, int(sys.argv[1]), sys.argv[2]))
