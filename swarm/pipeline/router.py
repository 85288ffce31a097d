"""Choice of the next stage's replica for a micro-batch: weighted fair queueing over virtual runtimes.

SWARM parallelism (arXiv 2301.11913, algorithm 1): every replica has a virtual runtime; the smallest is chosen, and the
choice advances it by the time this micro-batch is expected to take there. Shares come out inversely proportional to
expected times, interleaved rather than in bursts. Differences from the paper's code: a failure or timeout makes a
replica slow at once, and probing clears it; an overdue answer counts against a replica before its deadline; a published
queue counts; a new replica does not start with a flood.

Pure: no clock, no I/O. The sender passes its own monotonic `now_s`. A sender has one `ReplicaRouter`, for the next
stage.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Final

from peer.bounds import smoothed

TIMEOUT_FACTOR: Final = 4.0  # a nested call that times out too early throws away the work of all later stages
TINY_S: Final = 1e-6  # floor of an expected time, so that every choice advances a runtime
CLAIM_MAX: Final = 4.0  # a replica that we have not measured counts as at most this many times as fast as the median


@dataclass(frozen=True)
class RouterConfig:
    """The constants of the router."""

    smoothing: float = 0.2
    """Weight of the newest measurement."""
    slow_down: float = 4.0
    """Factor of a failure on expected times; each success halves it back."""
    slow_down_max: float = 64.0
    probe_s: float = 1.0
    """After a failure, until the replica gets one probe; doubled at each further failure up to `probe_max_s`."""
    probe_max_s: float = 60.0
    enter_s: float = 2.0
    """Senders first try a new replica within this many seconds, spread at random."""
    overdue: float = 2.5
    """An answer outstanding for this many times the usual makes its replica a second choice."""
    deadline_first_s: float = 30.0
    """The deadline while nothing was measured."""
    deadline_min_s: float = 0.5
    deadline_max_s: float = 120.0


@dataclass
class _Replica:
    """This sender's view of one replica. Times in seconds; `own_s` and `answer_s` are for a unit of work."""

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

    # The replicas

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
        """Note a replica's record, once each time it is read: micro-batches waiting there, its seconds for a unit of
        work; `link_s` is our own estimate. Values that cannot be are ignored. A stated speed counts only until we have
        measured it. The queue is one sample of how long we would wait. If it were taken as it is, a record seconds old
        would send all senders to the same replica at once (in the simulator, 72 instead of 91 percent of the ideal
        throughput)."""
        known = self._replicas.get(replica)
        if known is None or not all(math.isfinite(x) and x >= 0 for x in (queue, service_s, link_s)):
            return
        known.stated_s = service_s + link_s
        known.wait_s = smoothed(known.wait_s, queue * service_s, self.config.smoothing)

    # What happened to a micro-batch

    def choose(self, now_s: float, work: float = 1.0, exclude: Collection[str] = ()) -> str | None:
        """Return the replica for the next micro-batch of `work` units, outside `exclude` (where it failed already);
        None only if no replica is left. Call `sent` if the micro-batch is really sent there."""
        chosen = self._first_choice(now_s, exclude) or self._second_choice(now_s, exclude)
        if chosen is None:
            return None
        chosen.runtime += max(TINY_S, self._expected_s(chosen, work))
        self._push(chosen)
        return chosen.name

    def sent(self, replica: str, micro_batch: object, now_s: float, work: float = 1.0) -> None:
        """Note a call; `micro_batch` is any id that names it until it ends."""
        if known := self._replicas.get(replica):
            known.sent[micro_batch] = (now_s, work)

    def succeeded(
        self, replica: str, micro_batch: object, now_s: float, downstream_s: float = 0.0, queued_s: float = 0.0
    ) -> None:
        """Note an answer. Of the time since `sent`, the replica says it spent `queued_s` waiting for its device and
        `downstream_s` on the next stages. It is believed only as far as our own clock allows."""
        known = self._replicas.get(replica)
        if known is None or (outstanding := known.sent.pop(micro_batch, None)) is None:
            return
        sent_s, work = outstanding
        answer_s = max(0.0, now_s - sent_s)
        here_s = answer_s - _between(downstream_s, answer_s)
        waited_s = _between(queued_s, here_s)
        alpha = self.config.smoothing
        known.wait_s = smoothed(known.wait_s, waited_s, alpha)
        known.own_s = smoothed(known.own_s, (here_s - waited_s) / work, alpha)
        # The estimators of RFC 6298, TCP's retransmission timeout.
        per_unit_s = answer_s / work
        if known.answer_s is None:
            known.answer_deviation_s = per_unit_s / 2
        else:
            known.answer_deviation_s = smoothed(known.answer_deviation_s, abs(per_unit_s - known.answer_s), 1 / 4)
        known.answer_s = smoothed(known.answer_s, per_unit_s, 1 / 8)
        known.failures = 0
        known.penalty = max(1.0, known.penalty / 2)
        if known.probing:
            # While it was out the others ran on; starting from where it stopped it would be flooded to catch up.
            known.probing = False
            known.runtime = max(known.runtime, self._floor(known))
            self._push(known)

    def failed(self, replica: str, micro_batch: object, now_s: float) -> None:
        """Note a failure or a missed deadline: the replica is slow from now on, and gets one probe after a back-off."""
        known = self._replicas.get(replica)
        if known is None or known.sent.pop(micro_batch, None) is None:
            return
        config = self.config
        if known.probing and now_s < known.probe_at_s:
            return  # calls in flight at the first failure fail with it; that is one failure, not many
        known.failures += 1
        known.penalty = min(config.slow_down_max, known.penalty * config.slow_down)
        known.probing = True
        backoff_s = min(config.probe_max_s, config.probe_s * 2.0 ** min(known.failures - 1, 30))
        known.probe_at_s = now_s + backoff_s * self._random.uniform(0.75, 1.25)

    def declined(self, replica: str, micro_batch: object, now_s: float) -> None:
        """Note a full queue: back-pressure, no failure. The replica gets nothing for about one micro-batch's time."""
        known = self._replicas.get(replica)
        if known is not None and (outstanding := known.sent.pop(micro_batch, None)) is not None:
            known.probe_at_s = max(known.probe_at_s, now_s + (known.own_s or TINY_S) * outstanding[1])

    def cancelled(self, replica: str, micro_batch: object) -> None:
        """Note a call that the sender abandoned for reasons of its own; it says nothing about the replica."""
        if known := self._replicas.get(replica):
            known.sent.pop(micro_batch, None)

    # What to expect

    def pause_s(self, now_s: float) -> float:
        """Return, after `declined`, how long until a replica may be fit again; 0 if one is. Choosing earlier would only
        meet full queues."""
        if any(self._fit(known, now_s) for known in self._replicas.values()):
            return 0.0
        due = [r.probe_at_s - now_s for r in self._replicas.values() if r.probe_at_s > now_s]
        return min(due, default=0.0)

    def deadline_s(self, replica: str, work: float = 1.0) -> float:
        """Return how long to wait for an answer: from the mean and mean deviation of measured ones (as RFC 6298 for
        TCP, with a longer margin), doubled for each failure in a row. An unmeasured replica gets twice the longest of
        others.
        """
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
        """Return the expected time of the next micro-batch there: link, queue and compute, times the penalty."""
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
        """Return the fit replica with the smallest virtual runtime: nearly always the heap's first."""
        skipped = []
        chosen = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            known = self._replicas.get(entry[2])
            if known is None or known.runtime != entry[0]:
                continue  # stale: the replica has left, or has a new runtime
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
        """Return the best of the unfit: an overdue replica is better than one that just failed."""

        def reluctance(known: _Replica) -> tuple[float, float, str]:
            back_off_s = max(0.0, known.probe_at_s - now_s)
            return back_off_s if known.failures else 0.0, known.runtime, known.name

        return min((r for r in self._replicas.values() if r.name not in exclude), key=reluctance, default=None)

    def _floor(self, entering: _Replica | None = None) -> float:
        """Return the runtime at which a replica enters: the smallest of those in use."""
        used = [r.runtime for r in self._replicas.values() if r is not entering and not r.probing]
        return min(used, default=0.0)

    def _push(self, known: _Replica) -> None:
        heapq.heappush(self._heap, (known.runtime, self._random.random(), known.name))


def _timeout_s(known: _Replica) -> float:
    assert known.answer_s is not None
    return TIMEOUT_FACTOR * known.answer_s + 4 * known.answer_deviation_s


def _between(value: float, most: float) -> float:
    """Return `value` clipped to 0..most; 0 if it is not finite."""
    return min(max(value, 0.0), most) if math.isfinite(value) else 0.0
