"""The load that the peers of a pipeline publish, and the throughput of stages that follows from it.

Every peer publishes one `PeerLoad`; a `LoadView` is all that a peer has read. Units: `speed` is in work units a second
and a stage's `work` in units a micro-batch, so speed / work is micro-batches a second. A pipeline is as fast as its
slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Final

SPEED_MAX: Final = 1e30  # above any machine's; larger values could overflow a sum
CLAIM_MAX: Final = 4.0  # times the median is the most that a speed counts as: an exaggerated speed attracts no moves


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage to a replica."""

    work: float
    """Work units for a micro-batch."""
    state_bytes: float = 0.0
    """The bytes that a new replica downloads."""
    memory_bytes: float = 0.0
    needs_text: bool = False
    """It reads the run's text, as the first stage does."""


@dataclass(frozen=True)
class PeerLoad:
    """One peer's record."""

    peer: str
    stage: int
    """The peer's stage, or the one it moves to if `ready_s` lies ahead: then it is in flight and downloads that stage's
    state."""
    speed: float
    """Measured work units a second while busy, link included; 0 while unknown."""
    download_bytes_s: float = math.inf
    """Measured."""
    memory_bytes: float = math.inf
    since_s: float = -math.inf
    """When the peer chose this stage."""
    ready_s: float = -math.inf
    source: int | None = None
    """The stage that the peer moved from; None if it joined here."""
    has_text: bool = True
    """The peer's machine has the run's text."""
    pinned: bool = False
    """The peer never moves."""


@dataclass(frozen=True)
class LoadView:
    """All that a decision depends on, `now_s` included: peers with the same view decide the same. Records for stages
    that do not exist and second records of a peer are dropped; speeds that cannot be true are ignored."""

    now_s: float
    stages: tuple[StageCost, ...]
    peers: tuple[PeerLoad, ...]

    @staticmethod
    def of(now_s: float, stages: Sequence[StageCost], peers: Iterable[PeerLoad]) -> LoadView:
        """Return the view in canonical order, by peer id."""
        count = len(stages)
        known = {load.peer: load for load in peers if 0 <= load.stage < count}
        return LoadView(now_s, tuple(stages), tuple(known[peer] for peer in sorted(known)))

    @cached_property
    def usual_speed(self) -> float:
        """The median of the known speeds; 1 if none is known."""
        known = [load.speed for load in self.peers if 0 < load.speed < SPEED_MAX]
        return median_low(known) if known else 1.0

    @cached_property
    def speeds(self) -> list[float]:
        """The believed speed of each of `peers`: the usual one where none is known."""
        return [self.speed(load) for load in self.peers]

    def speed(self, load: PeerLoad) -> float:
        """Return the believed speed of one record, which need not be in the view."""
        usual = self.usual_speed
        # The comparison is false for NaN too.
        return min(load.speed, CLAIM_MAX * usual) if 0 < load.speed < SPEED_MAX else usual

    def in_flight(self, load: PeerLoad) -> bool:
        return load.ready_s > self.now_s

    def throughputs(self) -> list[float]:
        """Return micro-batches a second of each stage; peers in flight count at the stage they move to."""
        speeds: list[list[float]] = [[] for _ in self.stages]
        for load, speed in zip(self.peers, self.speeds, strict=True):
            speeds[load.stage].append(speed)
        # fsum: exactly rounded, so that no order of addition can make two peers disagree.
        return [math.fsum(s) / stage.work for s, stage in zip(speeds, self.stages, strict=True)]


def fits(load: PeerLoad, stage: StageCost) -> bool:
    """Return whether that peer could serve the stage."""
    return load.memory_bytes >= stage.memory_bytes and (load.has_text or not stage.needs_text)


def move_s(load: PeerLoad, target: StageCost) -> float:
    """Return how long the peer of `load` would be out while it downloads the state of `target`."""
    if target.state_bytes <= 0:
        return 0.0
    return target.state_bytes / load.download_bytes_s if load.download_bytes_s > 0 else math.inf
