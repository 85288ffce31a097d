"""Moves of peers between stages: a pure decision from published load, the same for all peers with the same view.

The aim is the throughput of the slowest stage. A move takes the best fitting peer, the slower one of two that fit
alike, from the fastest stage to the slowest. Each move must leave the slower of both stages above the level of the
slowest before. So the sorted throughputs of the stages only ever grow, and at constant speeds no peer can move back and
forth.

Several stages may tie for the slowest, so a short plan of moves is judged as a whole. Its gain over a horizon must
exceed its cost (the movers' work while they download) by a margin, and the noise of measured speeds. SWARM (arXiv
2301.11913, algorithm 2) moves one peer every T seconds by queue lengths, whatever the gain.

Agreement needs no messages: a peer carries out only its own move, and announces it at once by publishing its new stage
and the time at which it will be ready. A move in flight blocks others (a large swarm allows a few at once, see
`RebalanceConfig.flights`). A move does not block if its peer is pinned (`PeerLoad.pinned`) or if it began further from
now than the horizon, so a false record blocks moves only for a while. Where views differ for a moment, each view can
cause one surplus move; the next decision counts that peer at its new stage.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from swarm.placement.load import LoadView, PeerLoad, fits, move_s

ROUNDING: Final = 1e-9  # relative; a smaller gain may come from the order of additions


@dataclass(frozen=True)
class RebalanceConfig:
    """The constants of a decision."""

    horizon_s: float = 600.0
    """How long a gain is counted: peers come and go."""
    margin: float = 1.5
    """The gain must exceed the cost by this factor."""
    noise: float = 0.1
    """Relative error of one measured speed, at most."""
    stay_s: float = 120.0
    """A peer stays at its stage for at least this long, unless a stage is empty."""
    peers_a_flight: int = 256
    """One move in flight at once for this many peers, and at least one. More did not help on preemption traces: every
    mover is out for a while."""
    period_min_s: float = 20.0

    def period_s(self, peers: int) -> float:
        """Return how often to read all records and decide. Reading costs in proportion to the number of peers, and the
        more there are the less one matters: beyond a thousand peers the traffic of a peer stays constant."""
        return max(self.period_min_s, self.period_min_s * peers / 1000)

    def flights(self, peers: int) -> int:
        """Return how many peers may be in flight at once: one in a swarm of fewer than 2 * `peers_a_flight`."""
        return max(1, peers // self.peers_a_flight)


@dataclass(frozen=True)
class Move:
    """One peer's move from stage `source` to stage `target`."""

    peer: str
    source: int
    target: int
    gain: float
    """Micro-batches a second that the whole plan should add."""


def decide(view: LoadView, config: RebalanceConfig | None = None) -> tuple[Move, ...]:
    """Return the moves to start now, at most one a peer; empty if no plan is worth it or enough moves are in flight.

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
    if base == 0.0:  # a stage has no peer, not even in flight: nothing runs
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
        # The mover's work meanwhile, as its part of a whole pipeline.
        cost += min(out_s, config.horizon_s) * view.speed(load) / plan.pipeline_work
        gain = min(plan.throughputs) - base
        finished_s = math.ceil(len(steps) / allowed) * longest_s
        net = gain * max(0.0, config.horizon_s - finished_s) - config.margin * cost
        if gain > noise and net > best_net:
            best, best_net, gain_of_best = len(steps), net, gain
        elif base == 0.0 and gain > 0.0 and best == 0:
            best, gain_of_best = len(steps), gain  # a stage is empty: worth it, however long the move takes
    return tuple(Move(s.peer, s.source, s.target, gain_of_best) for s in steps[: min(best, allowed)])


def stages_for_joiners(view: LoadView, joiners: Iterable[PeerLoad]) -> dict[str, int]:
    """Return the stages of peers that have none yet; their `stage` and `ready_s` are ignored. Each gets the slowest
    stage that it can serve. They choose in the order of peer ids, so that joiners that know of each other agree. A
    joiner that can serve no stage is left out."""
    throughputs = view.throughputs()
    chosen: dict[str, int] = {}
    for load in sorted(joiners, key=lambda load: load.peer):
        fitting = [s for s, stage in enumerate(view.stages) if fits(load, stage)]
        if not fitting:
            continue
        speed = view.speed(load)
        # Each peer breaks ties in its own order: joiners that do not see each other should not all take the first
        # stage.
        stage = min(fitting, key=lambda s: (throughputs[s], view.stages[s].work, _tie_break(load.peer, s)))
        throughputs[stage] += speed / view.stages[stage].work
        chosen[load.peer] = stage
    return chosen


def stage_for_joiner(view: LoadView, joiner: PeerLoad) -> int | None:
    """Return the stage that gains most from `joiner`; None if it can serve none."""
    return stages_for_joiners(view, [joiner]).get(joiner.peer)


class _Plan:
    """The stages after the moves planned so far."""

    def __init__(self, view: LoadView, config: RebalanceConfig) -> None:
        self.view = view
        self.loads = {load.peer: load for load in view.peers}
        self.throughputs = view.throughputs()
        self.pipeline_work = math.fsum(stage.work for stage in view.stages)
        urgent = min(self.throughputs) == 0.0
        # Peers that may move, by stage, the slowest first: (speed, seconds out at equal state size, peer).
        self._movable: list[list[tuple[float, float, str]]] = [[] for _ in view.stages]
        for load, speed in zip(view.peers, view.speeds, strict=True):
            settled = urgent or view.now_s - load.since_s >= config.stay_s
            if settled and not view.in_flight(load) and not load.pinned:
                self._movable[load.stage].append((speed, -load.download_bytes_s, load.peer))
        for movable in self._movable:
            movable.sort()

    def spread(self) -> float:
        """Return the error of the slowest stage's throughput if every speed is off by its own size, independently."""
        slowest = self._slowest()
        speeds = (v for load, v in zip(self.view.peers, self.view.speeds, strict=True) if load.stage == slowest)
        return math.sqrt(math.fsum(speed * speed for speed in speeds)) / self.view.stages[slowest].work

    def _slowest(self) -> int:
        return min(range(len(self.throughputs)), key=lambda s: (self.throughputs[s], s))

    def step(self) -> Move | None:
        """Make the next move, from the fastest stage with a fitting peer; None if no move helps."""
        slowest = self._slowest()
        donors = sorted(range(len(self.throughputs)), key=lambda s: (-self.throughputs[s], s))
        for source in donors:
            if self.throughputs[source] <= self.throughputs[slowest]:
                return None
            found = self._fitting(source, slowest)
            if found is not None:
                speed, _, peer = found
                self._movable[source].remove(found)
                self.throughputs[source] -= speed / self.view.stages[source].work
                self.throughputs[slowest] += speed / self.view.stages[slowest].work
                return Move(peer, source, slowest, 0.0)
        return None

    def _fitting(self, source: int, target: int) -> tuple[float, float, str] | None:
        """Return the peer whose move leaves the slower of both stages fastest, and faster than `target` is now."""
        fast, slow = self.throughputs[source], self.throughputs[target]
        source_work, target_work = self.view.stages[source].work, self.view.stages[target].work
        movable = self._movable[source]
        levelling = (fast - slow) / (1 / source_work + 1 / target_work)  # the speed that would leave both equal
        at = bisect_left(movable, (levelling, -math.inf, ""))
        best: tuple[float, float, str] | None = None
        best_level = slow * (1.0 + ROUNDING)
        # Two candidates, one on each side: the slower stage's level rises up to `levelling` and falls beyond it.
        below = next((m for m in reversed(movable[:at]) if self._holds(m, target)), None)
        if below is not None:  # of equally fast peers the first, which is out for the shortest time
            first = bisect_left(movable, (below[0], -math.inf, ""))
            below = next(m for m in movable[first:at] if self._holds(m, target))
        above = next((m for m in movable[at:] if self._holds(m, target)), None)
        for candidate in (below, above):
            if candidate is not None:
                level = min(fast - candidate[0] / source_work, slow + candidate[0] / target_work)
                if level > best_level:
                    best, best_level = candidate, level
        return best

    def _holds(self, movable: tuple[float, float, str], target: int) -> bool:
        return fits(self.loads[movable[2]], self.view.stages[target])


def _tie_break(peer: str, stage: int) -> bytes:
    return blake3(f"{peer}/{stage}".encode()).digest(8)
