"""Block servers under churn in virtual time: the placement rule that runs (`swarm.serving.placement`), with servers
that come, fetch, serve, move and vanish, and see each other's records late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec

from benchmarks.simulation.clock import VirtualClock
from peer.ipc.span import Span
from swarm.inference.record import ServerRecord
from swarm.membership.membership import REFRESH_S, TTL_S
from swarm.serving.placement import LOOK_S, PlacementView, better_blocks, block_rates, choose_blocks

EPOCH_S: Final = 1e9
"""Unix time at the begin of the simulation."""


@dataclass(frozen=True)
class ServingScenario:
    """What is simulated. Times are seconds."""

    blocks: int
    servers: int
    """That serve at a time, in the mean."""
    life_s: float
    """In the mean; exponentially distributed."""
    fetch_s: float
    """To fetch one block; a server fetches its blocks one after the other."""
    lasts_s: float
    replicas: float = 3.0
    """Of each block, in the mean, if all were placed evenly."""
    warm_up_s: float = 600.0
    """Before anything is judged: all servers come in it, one after the other."""


@dataclass
class SimulatedServer:
    """One server: its power, and what it has published."""

    name: str
    room: int
    block_ms: float
    record: ServerRecord
    born_s: float
    moved_at: list[float] = field(default_factory=list)
    gone_s: float | None = None


@dataclass
class ServingOutcome:
    """What came of it."""

    uncovered_s: float = 0.0
    """The longest time for which a block had no server."""
    fetch_s: float = 0.0
    """The longest fetch of a server."""
    moves: int = 0
    closest_moves_s: float = float("inf")
    """The shortest time between two moves of one server."""
    shares: list[float] = field(default_factory=list)
    """The rate of the worst block, as a share of what the same servers reach if they are placed again, largest first;
    a sample every minute."""


class SimulatedServing:
    """Runs one scenario. All randomness comes from `seed`."""

    def __init__(self, scenario: ServingScenario, seed: int) -> None:
        self._scenario, self._random = scenario, Random(seed)
        self._clock = VirtualClock()
        self._servers: dict[str, SimulatedServer] = {}
        self._count = 0
        self._uncovered_since: dict[int, float] = {}
        self.outcome = ServingOutcome()

    def run(self) -> ServingOutcome:
        """Simulate, and return the outcome."""
        scenario = self._scenario
        for _ in range(scenario.servers):
            self._clock.at(self._random.uniform(0, scenario.warm_up_s / 2), self._come)
        self._clock.at(scenario.warm_up_s, self._sample)
        self._clock.run_until(scenario.lasts_s)
        self._watch()
        for since in self._uncovered_since.values():
            self._note_uncovered(since)
        return self.outcome

    # -- the life of a server ------------------------------------------------------------------------------------------

    def _come(self) -> None:
        self._count += 1
        chance = self._random
        mean = self._scenario.replicas * self._scenario.blocks / self._scenario.servers
        room = max(1, min(self._scenario.blocks, round(chance.lognormvariate(-0.08, 0.4) * mean)))  # the mean is kept
        block_ms = chance.uniform(0.5, 2.0)
        name = f"s{self._count}"
        view = self._view(name)
        span = choose_blocks(view, room, chance.random)
        server = SimulatedServer(name, room, block_ms, self._record(span, block_ms), self._clock.now_s)
        self._servers[name] = server
        self._begin(server, span)
        life_s = chance.expovariate(1 / self._scenario.life_s)
        if self._clock.now_s + life_s > self._scenario.warm_up_s:  # those of the beginning are there
            self._clock.after(life_s, lambda: self._go(server))
        self._clock.after(self._look_s(), lambda: self._look(server))

    def _go(self, server: SimulatedServer) -> None:
        """A server vanishes without a word; another one comes at some other time."""
        server.gone_s = self._clock.now_s
        self._watch()
        self._clock.after(TTL_S, lambda: self._forget(server))
        self._clock.after(self._random.expovariate(1 / 30.0), self._come)

    def _forget(self, server: SimulatedServer) -> None:
        del self._servers[server.name]

    def _begin(self, server: SimulatedServer, span: Span) -> None:
        """A server fetches blocks; its record says so."""
        fetch_s = self._scenario.fetch_s * span.count
        self.outcome.fetch_s = max(self.outcome.fetch_s, fetch_s)
        now = EPOCH_S + self._clock.now_s
        server.record = msgspec.structs.replace(
            server.record, first=span.first, end=span.end, since=now, ready_at=now + fetch_s
        )
        self._watch()
        self._clock.after(fetch_s, self._watch)

    def _look(self, server: SimulatedServer) -> None:
        if server.gone_s is not None:
            return
        now = EPOCH_S + self._clock.now_s
        better = better_blocks(self._view(server.name), server.record, server.room, now, self._random.random)
        if better is not None:
            self.outcome.moves += 1
            if server.moved_at:
                self.outcome.closest_moves_s = min(
                    self.outcome.closest_moves_s, self._clock.now_s - server.moved_at[-1]
                )
            server.moved_at.append(self._clock.now_s)
            self._begin(server, better)
        self._clock.after(self._look_s(), lambda: self._look(server))

    def _look_s(self) -> float:
        return LOOK_S * (0.5 + self._random.random())

    def _view(self, me: str) -> PlacementView:
        """What a server has read: records that are up to `REFRESH_S` old, and those of peers that are gone."""
        now = self._clock.now_s
        late_s = self._random.uniform(0, REFRESH_S)
        seen = {
            name: server.record
            for name, server in self._servers.items()
            if name != me and server.record.since - EPOCH_S <= now - late_s
        }
        return PlacementView(self._scenario.blocks, seen)

    def _record(self, span: Span, block_ms: float) -> ServerRecord:
        now = EPOCH_S + self._clock.now_s
        return ServerRecord(
            session="s",
            name="simulated",
            version="0",
            addresses=[],
            joined_at=now,
            at=now,
            first=span.first,
            end=span.end,
            since=now,
            ready_at=now,
            step_ms=block_ms * span.count,
        )

    # -- what is judged ------------------------------------------------------------------------------------------------

    def _serving(self) -> list[SimulatedServer]:
        now = EPOCH_S + self._clock.now_s
        return [s for s in self._servers.values() if s.gone_s is None and s.record.ready_at <= now]

    def _watch(self) -> None:
        """Note which blocks have lost their last server, or have one again."""
        now = self._clock.now_s
        if now < self._scenario.warm_up_s:
            return
        covered = {block for s in self._serving() for block in range(s.record.first, s.record.end)}
        for block in range(self._scenario.blocks):
            if block not in covered:
                self._uncovered_since.setdefault(block, now)
            elif block in self._uncovered_since:
                self._note_uncovered(self._uncovered_since.pop(block))

    def _note_uncovered(self, since: float) -> None:
        self.outcome.uncovered_s = max(self.outcome.uncovered_s, self._clock.now_s - since)

    def _sample(self) -> None:
        """Compare the worst block's rate with what the servers that serve could reach."""
        serving = self._serving()
        rate = min(block_rates(PlacementView(self._scenario.blocks, {s.name: s.record for s in serving})))
        best = self._best(serving)
        if best > 0:
            self.outcome.shares.append(rate / best)
        self._clock.after(60.0, self._sample)

    def _best(self, servers: list[SimulatedServer]) -> float:
        """Return the worst block's rate if these servers are placed one after the other, largest first."""
        placed = dict[str, ServerRecord]()
        for server in sorted(servers, key=lambda s: -s.room):
            span = choose_blocks(PlacementView(self._scenario.blocks, placed), server.room, Random(1).random)
            placed[server.name] = self._record(span, server.block_ms)
        return min(block_rates(PlacementView(self._scenario.blocks, placed)))
