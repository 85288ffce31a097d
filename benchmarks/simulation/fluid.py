"""A pipeline as a flow: stages of up to 10,000 peers replaying a trace under a rebalancing policy.

Approximated: micro-batches are a fluid, a stage's throughput is the sum of its replicas', and the pipeline's is that
of its slowest stage. `benchmarks.simulation.pipeline` shows that the router comes close to this. Not approximated: a
peer that joins or moves serves only after it has downloaded its stage's state over its own link; views are late
(`lag_s`); dead peers stay in them until their record expires; speeds are measured with an error.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.policies import Policy
from benchmarks.simulation.trace import Life, Trace
from swarm.placement.load import LoadView, PeerLoad, StageCost, move_s


@dataclass(frozen=True)
class FluidConfig:
    """The settings of a simulation."""

    stages: tuple[StageCost, ...]
    lag_s: float = 5.0
    """From an announcement until all peers have read it."""
    reread_s: float = 0.0
    """Views of joiners may be older by so much, which saves time with thousands of peers."""
    expiry_s: float = 30.0
    """How long a record outlives its peer."""
    speed_error: float = 0.05
    """Relative error of a measured speed."""
    remeasure_s: float = 300.0
    """How often speeds are measured."""
    seed: int = 0


@dataclass
class FluidReport:
    """What a simulation measured."""

    policy: str
    duration_s: float
    pieces: list[tuple[float, float, float]] = field(default_factory=list)
    """(start, micro-batches a second achieved, of the optimum), each until the next one's start."""
    moves: int = 0
    joins: int = 0
    decisions: int = 0
    decision_cpu_s: float = 0.0
    records: int = 0  # published by all peers together: periodic ones and announcements
    records_read: int = 0
    peer_seconds: float = 0.0

    def percent_of_optimal(self, first_s: float = 0.0, last_s: float = math.inf) -> float:
        """Return the work done between two times in percent of an optimal assignment's."""
        done = best = 0.0
        ends = [piece[0] for piece in self.pieces[1:]] + [self.duration_s]
        for (begin_s, achieved, optimum), end_s in zip(self.pieces, ends, strict=True):
            piece_s = min(end_s, last_s) - max(begin_s, first_s)
            if piece_s > 0:
                done += piece_s * achieved
                best += piece_s * optimum
        return 100.0 * done / best if best else 0.0


def simulate_fluid(trace: Trace, policy: Policy, config: FluidConfig) -> FluidReport:
    """Replay `trace`. Peers there at the start are spread over the stages in proportion to work, and have their
    state."""
    return _Fluid(trace, policy, config).run()


class Optimum:
    """The best throughput of any assignment of the live peers, with free moves and perfect views. Exact for equal
    speeds. Otherwise all speed over all work, which no assignment exceeds and many peers come close to."""

    def __init__(self, works: Sequence[float]) -> None:
        self._works = list(works)
        self._speeds: dict[float, int] = {}
        self._total = 0.0
        self._table = [0.0]  # throughput of n peers of speed 1
        self._stages = [(0.0, work) for work in works]  # (throughput, work), the slowest first
        heapq.heapify(self._stages)

    def add(self, speed: float, count: int) -> None:
        """Add `count` peers of that speed; remove them if negative."""
        self._speeds[speed] = self._speeds.get(speed, 0) + count
        self._total += speed * count
        if not self._speeds[speed]:
            del self._speeds[speed]

    def throughput(self) -> float:
        if len(self._speeds) != 1:
            return self._total / math.fsum(self._works) if self._speeds else 0.0
        ((speed, count),) = self._speeds.items()
        while len(self._table) <= count:
            throughput, work = heapq.heappop(self._stages)  # adding to the slowest is optimal for equal peers
            heapq.heappush(self._stages, (throughput + 1.0 / work, work))
            self._table.append(self._stages[0][0])
        return speed * self._table[count]


class _Fluid:
    def __init__(self, trace: Trace, policy: Policy, config: FluidConfig) -> None:
        self.trace, self.policy, self.config = trace, policy, config
        self.clock = VirtualClock()
        self.random = Random(config.seed)
        self.report = FluidReport(policy.name, trace.duration_s)
        self.lives: dict[str, Life] = {}  # of live peers
        self.loads: dict[str, PeerLoad] = {}  # their true stages
        self.seen: dict[str, PeerLoad] = {}  # what all peers have read
        self.measured: dict[str, float] = {}
        self.serving: list[dict[str, float]] = [{} for _ in config.stages]  # true speeds, of peers with their state
        self.speeds = [0.0] * len(config.stages)
        self.optimum = Optimum([stage.work for stage in config.stages])
        self.joiners_view: LoadView | None = None
        self.since_s = 0.0  # until when peer_seconds are counted

    def run(self) -> FluidReport:
        starters = [life for life in self.trace.lives if life.join_s <= 0]
        filled = [0.0] * len(self.config.stages)
        for life in starters:
            stage = min(range(len(filled)), key=lambda s: (filled[s], s))
            filled[stage] += life.speed / self.config.stages[stage].work
            self._settle(life, stage)
        for life in self.trace.lives:
            if life.join_s > 0:
                self.clock.at(life.join_s, partial(self._join, life))
            if life.end_s <= self.trace.duration_s:
                self.clock.at(life.end_s, partial(self._leave, life))
        period_s = self.policy.period_s(len(self.lives))
        if math.isfinite(period_s):
            self.clock.after(period_s, self._decide)
            self.clock.after(self.config.remeasure_s, self._remeasure)
        self._note()
        self.clock.run_until(self.trace.duration_s)
        self._count_peers()
        return self.report

    # Events

    def _settle(self, life: Life, stage: int) -> None:
        self.lives[life.peer] = life
        self.measured[life.peer] = self._measure(life)
        self.loads[life.peer] = self.seen[life.peer] = PeerLoad(
            life.peer, stage, self.measured[life.peer], life.link_bytes_s
        )
        self._serve(life, stage)
        self.optimum.add(life.speed, 1)

    def _join(self, life: Life) -> None:
        self._count_peers()
        self.lives[life.peer] = life
        self.report.joins += 1
        self.measured[life.peer] = self._measure(life)
        asking = PeerLoad(life.peer, -1, self.measured[life.peer], life.link_bytes_s, since_s=self.clock.now_s)
        self.report.records_read += len(self.seen)
        if self.joiners_view is None or self.clock.now_s - self.joiners_view.now_s >= self.config.reread_s:
            self.joiners_view = self._view()
        stage = self.policy.join(self.joiners_view, asking)
        if stage is None:
            return
        self._go(life, replace(asking, stage=stage))
        # Even an optimal assignment cannot use it before it has a stage's state.
        least_s = min(move_s(asking, cost) for cost in self.config.stages)
        self.clock.after(least_s, lambda: self._count_for_optimum(life))

    def _leave(self, life: Life) -> None:
        self._count_peers()
        del self.lives[life.peer]
        load = self.loads.pop(life.peer, None)
        if load is not None:
            self._stop(life, load.stage)
            if life.join_s <= 0 or self.clock.now_s - life.join_s >= min(move_s(load, c) for c in self.config.stages):
                self.optimum.add(life.speed, -1)
        self.clock.after(self.config.expiry_s, lambda: self._expire(life.peer))
        self._note()

    def _go(self, life: Life, load: PeerLoad) -> None:
        """Announce the new stage and download its state."""
        now_s = self.clock.now_s
        out_s = move_s(load, self.config.stages[load.stage])
        going = replace(load, since_s=now_s, ready_s=now_s + out_s)
        self.loads[life.peer] = going
        self.report.records += 1
        self.clock.after(self.config.lag_s, lambda: self._read(going))
        self.clock.after(out_s, lambda: self._arrive(life, going))

    def _read(self, load: PeerLoad) -> None:
        if load.peer in self.lives:
            self.seen[load.peer] = load

    def _expire(self, peer: str) -> None:
        self.seen.pop(peer, None)

    def _arrive(self, life: Life, load: PeerLoad) -> None:
        if self.loads.get(life.peer) is load:
            self._serve(life, load.stage)
            self._note()

    def _decide(self) -> None:
        view = self._view()
        begin_s = time.process_time()
        moves = self.policy.moves(view)
        self.report.decision_cpu_s += time.process_time() - begin_s
        self.report.decisions += 1
        for move in moves:
            load = self.loads.get(move.peer)
            # A peer carries out only its own move, and knows its stage better than a late view does.
            if load is not None and load.stage == move.source and load.ready_s <= self.clock.now_s:
                life = self.lives[move.peer]
                self._stop(life, load.stage)
                self._go(life, replace(load, stage=move.target, source=move.source))
                self.report.moves += 1
        if moves:
            self._note()
        self.report.records += len(self.lives)
        self.report.records_read += len(self.lives) * len(view.peers)
        self.clock.after(self.policy.period_s(len(view.peers)), self._decide)

    def _remeasure(self) -> None:
        for peer, load in self.seen.items():
            if (life := self.lives.get(peer)) is not None:
                self.measured[peer] = self._measure(life)
                self.seen[peer] = replace(load, speed=self.measured[peer])
        self.clock.after(self.config.remeasure_s, self._remeasure)

    # Accounts

    def _view(self) -> LoadView:
        return LoadView.of(self.clock.now_s, self.config.stages, self.seen.values())

    def _measure(self, life: Life) -> float:
        return life.speed * max(0.1, self.random.gauss(1.0, self.config.speed_error))

    def _serve(self, life: Life, stage: int) -> None:
        self.serving[stage][life.peer] = life.speed
        self.speeds[stage] += life.speed

    def _stop(self, life: Life, stage: int) -> None:
        self.speeds[stage] -= self.serving[stage].pop(life.peer, 0.0)
        if not self.serving[stage]:
            self.speeds[stage] = 0.0  # no rounding error

    def _count_for_optimum(self, life: Life) -> None:
        if life.peer in self.lives:
            self.optimum.add(life.speed, 1)
            self._note()

    def _count_peers(self) -> None:
        now_s = self.clock.now_s
        self.report.peer_seconds += len(self.lives) * (now_s - self.since_s)
        self.since_s = now_s

    def _note(self) -> None:
        achieved = min(s / c.work for s, c in zip(self.speeds, self.config.stages, strict=True))
        self.report.pieces.append((self.clock.now_s, achieved, self.optimum.throughput()))
