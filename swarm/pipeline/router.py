"""Which replica of the next stage gets the next micro-batch: interleaved weighted round-robin over virtual runtimes.

SWARM parallelism (arXiv 2301.11913, algorithm 1): every replica has a virtual runtime; the smallest is chosen, and the
choice advances it by the time this micro-batch is expected to take there. Shares come out inversely proportional to
expected times, interleaved rather than in bursts. What differs from the paper's code: a failure or timeout counts as
slow at once and is forgiven by probing, an answer that is overdue is held against a replica before its deadline, a
published queue counts, and nobody starts with a flood.

Pure: no clock, no I/O. The sender passes its own monotonic `now_s`. One `ReplicaRouter` for each next stage a sender
feeds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Final

TIMEOUT_FACTOR: Final = 4.0  # a nested call that times out too early throws away the work of all later stages
TINY_S: Final = 1e-6  # floor of an expected time, so that every choice advances a runtime
CLAIM_MAX: Final = 4.0  # a replica that we have not measured counts as at most this many times as fast as the median


@dataclass(frozen=True)
class RouterConfig:
    """`smoothing`: weight of the newest measurement. `slow_down`: what a failure multiplies expected times by (each
    success halves it back). A failed replica gets one probe after `probe_s`, doubled at each further failure up to
    `probe_max_s`. `enter_s`: senders first try a new replica within so many seconds, spread at random. `overdue`: an
    answer outstanding for so many times the usual makes its replica a second choice. Deadlines lie between
    `deadline_min_s` and `deadline_max_s`; while nothing was measured they are `deadline_first_s`."""

    smoothing: float = 0.2
    slow_down: float = 4.0
    slow_down_max: float = 64.0
    probe_s: float = 1.0
    probe_max_s: float = 60.0
    enter_s: float = 2.0
    overdue: float = 2.5
    deadline_first_s: float = 30.0
    deadline_min_s: float = 0.5
    deadline_max_s: float = 120.0


@dataclass
class _Replica:
    """What this sender knows of one replica. Times in seconds; `own_s` and `answer_s` are a unit of work's."""

    name: str
    runtime: float  # virtual; the one that is valid in the heap
    probing: bool = True  # one micro-batch at a time until one succeeds
    probe_at_s: float = -math.inf
    failures: int = 0  # in a row
    penalty: float = 1.0
    own_s: float | None = None  # compute and link, without waiting in the queue
    wait_s: float = 0.0  # in its queue, measured and published
    stated_s: float | None = None  # what it publishes of itself, used until something is measured
    answer_s: float | None = None  # whole call, what the deadline has to cover
    answer_deviation_s: float = 0.0
    sent: dict[object, tuple[float, float]] = field(default_factory=dict)  # micro-batch -> (when, work)


class ReplicaRouter:
    """Chooses among the replicas of one stage. Deterministic for a `seed` and a sequence of calls; senders should use
    different seeds, so that they do not walk in step."""

    def __init__(self, seed: int, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self._random = Random(seed)
        self._replicas: dict[str, _Replica] = {}
        self._heap: list[tuple[float, float, str]] = []  # (virtual runtime, random tie-break, name); stale ones skipped

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    # Who there is

    def update(self, replicas: Iterable[str], now_s: float) -> None:
        """Replace the set of live replicas. A new one soon gets one probing micro-batch; one that left is forgotten."""
        live = sorted(set(replicas))
        first = not self._replicas
        for name in self._replicas.keys() - set(live):
            del self._replicas[name]
        for name in live:
            known = self._replicas.get(name)
            if known is None:
                known = self._replicas[name] = _Replica(name, self._floor() - TINY_S)  # next, once it may
                if not first:
                    known.probe_at_s = now_s + self._random.uniform(0.0, self.config.enter_s)
                self._push(known)

    def published(self, replica: str, queue: float, service_s: float, link_s: float) -> None:
        """A replica's record, once each time it is read: micro-batches waiting there, its seconds a unit of work;
        `link_s` is our own estimate. Nonsense is ignored; what it says of its speed serves only until we have measured
        it. The queue is one sample of how long we would wait: taken at its word, a record seconds old makes all senders
        turn to the same replica at once (in the simulator, 72 instead of 91 percent of the ideal throughput)."""
        known = self._replicas.get(replica)
        if known is None or not all(math.isfinite(x) and x >= 0 for x in (queue, service_s, link_s)):
            return
        known.stated_s = service_s + link_s
        known.wait_s += self.config.smoothing * (queue * service_s - known.wait_s)

    # What happened to a micro-batch

    def choose(self, now_s: float, work: float = 1.0, exclude: Collection[str] = ()) -> str | None:
        """The replica for the next micro-batch of `work` units, outside `exclude` (those that it already failed on).
        None only if no replica is left. Call `sent` if it is really sent there."""
        chosen = self._first_choice(now_s, exclude) or self._second_choice(now_s, exclude)
        if chosen is None:
            return None
        chosen.runtime += max(TINY_S, self._expected_s(chosen, work))
        self._push(chosen)
        return chosen.name

    def sent(self, replica: str, micro_batch: object, now_s: float, work: float = 1.0) -> None:
        """`micro_batch`: any id that names this call until it ends."""
        if known := self._replicas.get(replica):
            known.sent[micro_batch] = (now_s, work)

    def succeeded(
        self, replica: str, micro_batch: object, now_s: float, downstream_s: float = 0.0, queued_s: float = 0.0
    ) -> None:
        """It answered. Of the time since `sent`, it says it spent `queued_s` waiting for its device and `downstream_s`
        on the next stages; what a replica says of itself is only believed as far as our own clock allows."""
        known = self._replicas.get(replica)
        if known is None or (outstanding := known.sent.pop(micro_batch, None)) is None:
            return
        sent_s, work = outstanding
        answer_s = max(0.0, now_s - sent_s)
        here_s = answer_s - _between(downstream_s, answer_s)
        waited_s = _between(queued_s, here_s)
        alpha = self.config.smoothing
        known.wait_s += alpha * (waited_s - known.wait_s)
        known.own_s = _blend(known.own_s, (here_s - waited_s) / work, alpha)
        # The estimators of RFC 6298, TCP's retransmission timeout.
        per_unit_s = answer_s / work
        if known.answer_s is None:
            known.answer_deviation_s = per_unit_s / 2
        else:
            known.answer_deviation_s += (abs(per_unit_s - known.answer_s) - known.answer_deviation_s) / 4
        known.answer_s = _blend(known.answer_s, per_unit_s, 1 / 8)
        known.failures = 0
        known.penalty = max(1.0, known.penalty / 2)
        if known.probing:
            # While it was out the others ran on; starting from where it stopped it would be flooded to catch up.
            known.probing = False
            known.runtime = max(known.runtime, self._floor(known))
            self._push(known)

    def failed(self, replica: str, micro_batch: object, now_s: float) -> None:
        """It failed, or did not answer within its deadline: slow from now on, and one probe after a back-off."""
        known = self._replicas.get(replica)
        if known is None or known.sent.pop(micro_batch, None) is None:
            return
        config = self.config
        if known.probing and now_s < known.probe_at_s:
            return  # what was in flight at the first failure fails with it; that is one failure, not many
        known.failures += 1
        known.penalty = min(config.slow_down_max, known.penalty * config.slow_down)
        known.probing = True
        backoff_s = min(config.probe_max_s, config.probe_s * 2.0 ** min(known.failures - 1, 30))
        known.probe_at_s = now_s + backoff_s * self._random.uniform(0.75, 1.25)

    def declined(self, replica: str, micro_batch: object, now_s: float) -> None:
        """Its bounded queue was full: back-pressure, no failure. It is let alone for about one micro-batch's time."""
        known = self._replicas.get(replica)
        if known is not None and (outstanding := known.sent.pop(micro_batch, None)) is not None:
            known.probe_at_s = max(known.probe_at_s, now_s + (known.own_s or TINY_S) * outstanding[1])

    def cancelled(self, replica: str, micro_batch: object) -> None:
        """The sender gave the call up for reasons of its own; nothing is learnt about the replica."""
        if known := self._replicas.get(replica):
            known.sent.pop(micro_batch, None)

    # What to expect

    def pause_s(self, now_s: float) -> float:
        """After `declined`: how long until somebody may be fit again; 0 if somebody is. Choosing earlier would only
        knock at full queues."""
        if any(self._fit(known, now_s) for known in self._replicas.values()):
            return 0.0
        due = [r.probe_at_s - now_s for r in self._replicas.values() if r.probe_at_s > now_s]
        return min(due, default=0.0)

    def deadline_s(self, replica: str, work: float = 1.0) -> float:
        """How long to wait for an answer: from the mean and mean deviation of measured ones (as RFC 6298 does for TCP,
        more patiently), doubled for each failure in a row. An unmeasured replica gets twice the longest of others."""
        config = self.config
        known = self._replicas.get(replica)
        usual = [_timeout_s(r) * work for r in self._replicas.values() if r.answer_s is not None]
        if known is not None and known.answer_s is not None:
            wait_s = _timeout_s(known) * work
        else:
            wait_s = 2 * max(usual) if usual else config.deadline_first_s
        wait_s *= 2.0 ** min(known.failures, 10) if known is not None else 1.0
        return min(config.deadline_max_s, max(config.deadline_min_s, wait_s))

    def expected_s(self, replica: str, work: float = 1.0) -> float:
        """What the next micro-batch should take there: link, queue and compute, times its penalty."""
        return self._expected_s(self._replicas[replica], work)

    def in_flight(self, replica: str) -> int:
        known = self._replicas.get(replica)
        return len(known.sent) if known is not None else 0

    # Inside

    def _expected_s(self, known: _Replica, work: float) -> float:
        own_s = known.own_s
        if own_s is None:
            measured = [r.own_s for r in self._replicas.values() if r.own_s is not None]
            usual_s = median(measured) if measured else None
            stated_s = known.stated_s
            if stated_s is None:
                own_s = usual_s if usual_s is not None else 1.0
            else:
                own_s = stated_s if usual_s is None else max(stated_s, usual_s / CLAIM_MAX)
        return known.penalty * (own_s * work + known.wait_s)

    def _first_choice(self, now_s: float, exclude: Collection[str]) -> _Replica | None:
        """The smallest virtual runtime among those that are fit to be chosen: the heap's first, nearly always."""
        skipped = []
        chosen = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            known = self._replicas.get(entry[2])
            if known is None or known.runtime != entry[0]:
                continue  # stale: it has left, or moved on
            if known.name not in exclude and self._fit(known, now_s):
                chosen = known
                break
            skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return chosen

    def _fit(self, known: _Replica, now_s: float) -> bool:
        if now_s < known.probe_at_s or (known.probing and known.sent):
            return False
        if not known.sent or known.answer_s is None:
            return True
        since_s, work = next(iter(known.sent.values()))  # the oldest outstanding
        return now_s - since_s <= work * (self.config.overdue * known.answer_s + 2 * known.answer_deviation_s)

    def _second_choice(self, now_s: float, exclude: Collection[str]) -> _Replica | None:
        """Nobody is fit: rather one that is overdue than one that just failed."""

        def reluctance(known: _Replica) -> tuple[float, float, str]:
            back_off_s = max(0.0, known.probe_at_s - now_s)
            return back_off_s if known.failures else 0.0, known.runtime, known.name

        return min((r for r in self._replicas.values() if r.name not in exclude), key=reluctance, default=None)

    def _floor(self, newcomer: _Replica | None = None) -> float:
        """Where a newcomer enters: the smallest runtime of those that are really in use."""
        used = [r.runtime for r in self._replicas.values() if r is not newcomer and not r.probing]
        return min(used, default=0.0)

    def _push(self, known: _Replica) -> None:
        heapq.heappush(self._heap, (known.runtime, self._random.random(), known.name))


def _timeout_s(known: _Replica) -> float:
    assert known.answer_s is not None
    return TIMEOUT_FACTOR * known.answer_s + 4 * known.answer_deviation_s


def _blend(old: float | None, new: float, alpha: float) -> float:
    return new if old is None else old + alpha * (new - old)


def _between(value: float, most: float) -> float:
    """`value` within 0..most; 0 if it is no number."""
    return min(max(value, 0.0), most) if math.isfinite(value) else 0.0
