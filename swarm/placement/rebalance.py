"""Who moves to which stage: a pure decision from published load, the same for all that hold the same view.

The aim is the throughput of the slowest stage. A move takes the peer that fits best, the less useful one where two fit
alike, from the richest stage to the poorest. Only moves that raise the poorer of the two above what the poorest was are
considered, so that the sorted throughputs of the stages only ever grow: at constant speeds nobody can move to and fro.
Since several stages may tie for the slowest, a short plan of moves is judged as a whole: what it gains over a horizon
must exceed what it costs (the movers' work while they download), by a margin, and must stand out of the noise of
measured speeds. SWARM (arXiv 2301.11913, algorithm 2) moves one peer every T seconds by queue lengths, whatever it
gains.

Agreement without messages: a peer acts only on a move of its own, and announces it at once by publishing its new stage
with the time at which it will be ready. A move in flight blocks others (a large swarm allows a few at once, see
`RebalanceConfig.flights`), unless its peer is not counted on to move (`PeerLoad.pinned`) or began it further from now,
before or ahead, than the horizon: whoever claims to be under way for ever stops nobody. Where views differ for a
moment, the worst is one surplus move a view, which the next decision counts where it is going.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from swarm.placement.load import LoadView, PeerLoad, fits, move_s

ROUNDING: Final = 1e-9  # relative; a gain as small is an artefact of adding in another order


@dataclass(frozen=True)
class RebalanceConfig:
    """`horizon_s`: how long a gain is counted; peers come and go, so not for ever. `margin`: by how much the gain must
    exceed the cost. `noise`: relative error of one measured speed, generously. `stay_s`: a peer that chose its stage
    less long ago stays, unless a stage is empty. `peers_a_flight`: moves in flight at once, one for so many peers and
    at least one. More at once did not help on preemption traces: every mover is out for a while."""

    horizon_s: float = 600.0
    margin: float = 1.5
    noise: float = 0.1
    stay_s: float = 120.0
    peers_a_flight: int = 256
    period_min_s: float = 20.0

    def period_s(self, peers: int) -> float:
        """How often to read everybody's record and decide. Reading costs in proportion to the number of peers, and the
        more there are, the less one of them matters: beyond a thousand the traffic of a peer stays what it is."""
        return max(self.period_min_s, self.period_min_s * peers / 1000)

    def flights(self, peers: int) -> int:
        """How many peers may be on their way at once: one at a time in a swarm of fewer than 2 * `peers_a_flight`."""
        return max(1, peers // self.peers_a_flight)


@dataclass(frozen=True)
class Move:
    """`gain`: micro-batches a second that the plan which this move belongs to should add, all stages together."""

    peer: str
    source: int
    target: int
    gain: float


def decide(view: LoadView, config: RebalanceConfig | None = None) -> tuple[Move, ...]:
    """The moves to start now, by peer id nobody twice; empty if things are well enough or enough moves are in flight.

    Callers that must agree pass the same `view.now_s`, for instance the start of the current decision period.
    """
    config = config or RebalanceConfig()
    blocking = sum(
        view.in_flight(load)
        and load.source is not None
        and not load.pinned
        and abs(view.now_s - load.since_s) < config.horizon_s  # a little ahead: since the start of this period
        for load in view.peers
    )
    if len(view.stages) < 2 or not view.peers:
        return ()
    plan = _Plan(view, config)
    base = min(plan.throughputs)
    allowed = config.flights(len(view.peers)) - blocking
    if base == 0.0:  # nobody serves a stage or is on the way to it: without it nobody else arrives either
        allowed = max(1, allowed)
    if allowed <= 0:
        return ()
    noise = max(config.noise * plan.spread(), ROUNDING * base)
    steps: list[Move] = []
    best, best_net = 0, 0.0
    gain_of_best, cost = 0.0, 0.0
    longest_s = 0.0
    while len(steps) < 4 * len(view.stages) + allowed:
        step = plan.step()
        if step is None:
            break
        steps.append(step)
        load = plan.loads[step.peer]
        out_s = move_s(load, view.stages[step.target])
        longest_s = max(longest_s, out_s)
        # What the mover would have done meanwhile, as its part of a whole pipeline.
        cost += min(out_s, config.horizon_s) * view.speed(load) / plan.pipeline_work
        gain = min(plan.throughputs) - base
        finished_s = math.ceil(len(steps) / allowed) * longest_s
        net = gain * max(0.0, config.horizon_s - finished_s) - config.margin * cost
        if gain > noise and net > best_net:
            best, best_net, gain_of_best = len(steps), net, gain
        elif base == 0.0 and gain > 0.0 and best == 0:
            best, gain_of_best = len(steps), gain  # a stage is empty: nothing runs, however long the move takes
    return tuple(Move(s.peer, s.source, s.target, gain_of_best) for s in steps[: min(best, allowed)])


def stages_for_joiners(view: LoadView, joiners: Iterable[PeerLoad]) -> dict[str, int]:
    """Where peers without a stage go (their `stage` and `ready_s` are ignored): each takes the stage that gains most,
    which is the poorest that it can serve. By peer id, so that joiners that know of each other spread out alike.
    A joiner that can serve none is left out."""
    throughputs = view.throughputs()
    chosen: dict[str, int] = {}
    for load in sorted(joiners, key=lambda load: load.peer):
        fitting = [s for s, stage in enumerate(view.stages) if fits(load, stage)]
        if not fitting:
            continue
        speed = view.speed(load)
        # Where stages tie, joiners that do not see each other should not all take the first: each has its own order.
        stage = min(fitting, key=lambda s: (throughputs[s], view.stages[s].work, _lot(load.peer, s)))
        throughputs[stage] += speed / view.stages[stage].work
        chosen[load.peer] = stage
    return chosen


def stage_for_joiner(view: LoadView, joiner: PeerLoad) -> int | None:
    """The stage that gains most from `joiner`; None if it can serve none."""
    return stages_for_joiners(view, [joiner]).get(joiner.peer)


def predict(view: LoadView, moves: Sequence[Move]) -> list[float]:
    """Micro-batches a second of each stage once `moves` and everything in flight have arrived."""
    going = {move.peer: move.target for move in moves}
    speeds: list[list[float]] = [[] for _ in view.stages]
    for load in view.peers:
        speeds[going.get(load.peer, load.stage)].append(view.speed(load))
    return [math.fsum(s) / stage.work for s, stage in zip(speeds, view.stages, strict=True)]


class _Plan:
    """The stages as the moves planned so far will leave them."""

    def __init__(self, view: LoadView, config: RebalanceConfig) -> None:
        self.view = view
        self.loads = {load.peer: load for load in view.peers}
        self.throughputs = view.throughputs()
        self.pipeline_work = math.fsum(stage.work for stage in view.stages)
        urgent = min(self.throughputs) == 0.0
        # Who may move, by stage, the least useful first: (speed, seconds out at equal state size, peer).
        self._movable: list[list[tuple[float, float, str]]] = [[] for _ in view.stages]
        for load, speed in zip(view.peers, view.speeds, strict=True):
            settled = urgent or view.now_s - load.since_s >= config.stay_s
            if settled and not view.in_flight(load) and not load.pinned:
                self._movable[load.stage].append((speed, -load.download_bytes_s, load.peer))
        for movable in self._movable:
            movable.sort()

    def spread(self) -> float:
        """How far the poorest stage's throughput is off if every speed is off by its own size, independently."""
        poorest = self._poorest()
        speeds = (v for load, v in zip(self.view.peers, self.view.speeds, strict=True) if load.stage == poorest)
        return math.sqrt(math.fsum(speed * speed for speed in speeds)) / self.view.stages[poorest].work

    def _poorest(self) -> int:
        return min(range(len(self.throughputs)), key=lambda s: (self.throughputs[s], s))

    def step(self) -> Move | None:
        """Make the next move, from the richest stage that has a fitting peer; None if no move helps."""
        poorest = self._poorest()
        donors = sorted(range(len(self.throughputs)), key=lambda s: (-self.throughputs[s], s))
        for source in donors:
            if self.throughputs[source] <= self.throughputs[poorest]:
                return None
            found = self._fitting(source, poorest)
            if found is not None:
                speed, _, peer = found
                self._movable[source].remove(found)
                self.throughputs[source] -= speed / self.view.stages[source].work
                self.throughputs[poorest] += speed / self.view.stages[poorest].work
                return Move(peer, source, poorest, 0.0)
        return None

    def _fitting(self, source: int, target: int) -> tuple[float, float, str] | None:
        """The peer whose move leaves the poorer of both stages best, and better than `target` is now."""
        rich, poor = self.throughputs[source], self.throughputs[target]
        source_work, target_work = self.view.stages[source].work, self.view.stages[target].work
        movable = self._movable[source]
        levelling = (rich - poor) / (1 / source_work + 1 / target_work)  # the speed that would leave both equal
        at = bisect_left(movable, (levelling, -math.inf, ""))
        best: tuple[float, float, str] | None = None
        best_level = poor * (1.0 + ROUNDING)
        # Two candidates, one on each side: the poorer stage's level rises up to `levelling` and falls beyond it.
        below = next((m for m in reversed(movable[:at]) if self._holds(m, target)), None)
        if below is not None:  # of equally fast ones the first, which is the quickest to move
            first = bisect_left(movable, (below[0], -math.inf, ""))
            below = next(m for m in movable[first:at] if self._holds(m, target))
        above = next((m for m in movable[at:] if self._holds(m, target)), None)
        for candidate in (below, above):
            if candidate is not None:
                level = min(rich - candidate[0] / source_work, poor + candidate[0] / target_work)
                if level > best_level:
                    best, best_level = candidate, level
        return best

    def _holds(self, movable: tuple[float, float, str], target: int) -> bool:
        return fits(self.loads[movable[2]], self.view.stages[target])


def _lot(peer: str, stage: int) -> bytes:
    return blake3(f"{peer}/{stage}".encode()).digest(8)
