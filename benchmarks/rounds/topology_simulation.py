"""How long a plan of transfers takes on given links, if these are all that limits it.

A fluid model: transfers under way share the links by max-min fairness, as connections of TCP do in the long run. Two
peers have one connection each way. It carries one transfer at a time, in the order in which they became ready.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.rounds.topology_plans import Plan
from swarm.protocol.shares import LinkSpeed

TICK_S: Final = 1e-7
"""Transfers that end within this time end together, so that rounding makes no events of its own."""
EQUAL: Final = 1 + 1e-9

Rates = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def fair_rates(senders: Indices, receivers: Indices, up: Rates, down: Rates) -> Rates:
    """Return the max-min fair rate of each flow (F,), bytes/s: of those on the link with the least room for each of its
    flows first, then of the others in what is left. `up`, `down`: what the links of all peers carry (N,)."""
    peers, rates = len(up), np.zeros(len(senders))
    room, ways = np.concatenate([up, down]), np.stack([senders, receivers + len(up)])
    waiting = np.arange(len(senders))
    while len(waiting):
        flows = np.bincount(ways[:, waiting].ravel(), minlength=2 * peers)
        share = np.divide(room, flows, out=np.full(2 * peers, inf), where=flows > 0)
        least = share.min()
        full = (share <= least * EQUAL)[ways[:, waiting]].any(axis=0)
        rates[waiting[full]] = least
        room -= least * np.bincount(ways[:, waiting[full]].ravel(), minlength=2 * peers)
        waiting = waiting[~full]
    return rates


def simulated_s(plan: Plan, links: Sequence[LinkSpeed], delay_s: float = 0.0) -> float:
    """Return the seconds from the begin until the last transfer has arrived, each `delay_s` after it was sent."""
    return _Simulation(plan, links, delay_s).run()


class _Simulation:
    def __init__(self, plan: Plan, links: Sequence[LinkSpeed], delay_s: float) -> None:
        self._plan, self._delay_s = plan, delay_s
        self._up, self._down = (np.array(each, float) for each in zip(*((x.up, x.down) for x in links), strict=True))
        ways = dict.fromkeys((transfer.sender, transfer.receiver) for transfer in plan)
        self._way = {way: number for number, way in enumerate(ways)}
        self._senders, self._receivers = np.array(list(ways)).T
        self._queues = [deque[int]() for _ in ways]
        self._left = np.zeros(len(ways))
        """The bytes to go of the transfer at the head of each queue."""
        self._waits_for = [len(transfer.after) for transfer in plan]
        self._unlocks = [list[int]() for _ in plan]
        for number, transfer in enumerate(plan):
            for before in transfer.after:
                self._unlocks[before].append(number)

    def run(self) -> float:
        now_s, busy, rates = 0.0, np.array([-1]), np.zeros(1)
        on_the_way: list[tuple[float, int]] = []
        self._enqueue(number for number, count in enumerate(self._waits_for) if not count)
        while True:
            found = np.flatnonzero(self._left)
            if not np.array_equal(found, busy):
                busy = found
                rates = fair_rates(self._senders[busy], self._receivers[busy], self._up, self._down)
            if not len(busy) and not on_the_way:
                return now_s
            ends_s = self._left[busy] / rates
            step_s = min(ends_s.min(initial=inf), on_the_way[0][0] - now_s if on_the_way else inf)
            now_s += step_s
            over = busy[ends_s <= step_s + TICK_S]
            self._left[busy] = np.maximum(self._left[busy] - rates * step_s, 1e-12)
            for number in self._next(over):
                heapq.heappush(on_the_way, (now_s + self._delay_s, number))
            while on_the_way and on_the_way[0][0] <= now_s + TICK_S:
                self._arrive(heapq.heappop(on_the_way)[1])

    def _next(self, ways: Indices) -> list[int]:
        """Go on to the next transfer of each of these queues; return those that are sent."""
        sent = []
        for way in ways:
            queue = self._queues[way]
            sent.append(queue.popleft())
            self._left[way] = self._plan[queue[0]].size_bytes if queue else 0.0
        return sent

    def _arrive(self, number: int) -> None:
        ready = []
        for after in self._unlocks[number]:
            self._waits_for[after] -= 1
            if not self._waits_for[after]:
                ready.append(after)
        self._enqueue(ready)

    def _enqueue(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            transfer = self._plan[number]
            way = self._way[transfer.sender, transfer.receiver]
            if not self._queues[way]:
                self._left[way] = transfer.size_bytes
            self._queues[way].append(number)
