"""What the peers of a pipeline publish of their load, and what follows from it: the throughput of stages.

Every peer publishes one `PeerLoad`; a `LoadView` is what a peer has read of all. Units: `speed` is in work units a
second and a stage's `work` in units a micro-batch, so that speed / work is micro-batches a second. A pipeline is as
fast as its slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Final

SPEED_MAX: Final = 1e30  # of no machine; sums of what is above could overflow
CLAIM_MAX: Final = 4.0  # no speed counts as more than this many times the median: whoever boasts attracts no moves


@dataclass(frozen=True)
class StageCost:
    """`work` units a micro-batch takes, `state_bytes` a newcomer downloads, `memory_bytes` a replica needs;
    `needs_text`: it reads the run's text, as the first stage does."""

    work: float
    state_bytes: float = 0.0
    memory_bytes: float = 0.0
    needs_text: bool = False


@dataclass(frozen=True)
class PeerLoad:
    """One peer's record. `stage`: where it is, or where it is going if `ready_s` lies ahead: then it is in flight, and
    downloads that stage's state until about `ready_s`. `speed`: work units a second it has shown while busy, link
    included; 0 while unknown. `download_bytes_s`: measured. `since_s`: when it chose this stage. `source`: the stage
    that it moved from; None if it joined here. `has_text`: whether its machine has the run's text; `pinned`: whether it
    stays where it is, whatever others do."""

    peer: str
    stage: int
    speed: float
    download_bytes_s: float = math.inf
    memory_bytes: float = math.inf
    since_s: float = -math.inf
    ready_s: float = -math.inf
    source: int | None = None
    has_text: bool = True
    pinned: bool = False


@dataclass(frozen=True)
class LoadView:
    """All that a decision depends on. `now_s` belongs to it: peers that hold the same view decide the same. Records for
    stages that do not exist, and a second record of a peer, are dropped; so are speeds that cannot be true."""

    now_s: float
    stages: tuple[StageCost, ...]
    peers: tuple[PeerLoad, ...]

    @staticmethod
    def of(now_s: float, stages: Sequence[StageCost], peers: Iterable[PeerLoad]) -> LoadView:
        """The view in its canonical order, by peer id."""
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
        """The speed of each of `peers` that is believed: the usual one for whoever has shown none."""
        usual, most = self.usual_speed, CLAIM_MAX * self.usual_speed
        # The comparison is false for NaN too.
        return [min(load.speed, most) if 0 < load.speed < SPEED_MAX else usual for load in self.peers]

    def speed(self, load: PeerLoad) -> float:
        """The speed that is believed of one record, which need not be in the view."""
        usual = self.usual_speed
        return min(load.speed, CLAIM_MAX * usual) if 0 < load.speed < SPEED_MAX else usual

    def in_flight(self, load: PeerLoad) -> bool:
        return load.ready_s > self.now_s

    def throughputs(self) -> list[float]:
        """Micro-batches a second of each stage, those in flight counted where they are going."""
        speeds: list[list[float]] = [[] for _ in self.stages]
        for load, speed in zip(self.peers, self.speeds, strict=True):
            speeds[load.stage].append(speed)
        # fsum: exactly rounded, so that no order of addition can make two peers disagree.
        return [math.fsum(s) / stage.work for s, stage in zip(speeds, self.stages, strict=True)]


def fits(load: PeerLoad, stage: StageCost) -> bool:
    """Whether that peer could serve the stage."""
    return load.memory_bytes >= stage.memory_bytes and (load.has_text or not stage.needs_text)


def move_s(load: PeerLoad, target: StageCost) -> float:
    """How long `load`'s peer is out while it downloads the state of another stage."""
    if target.state_bytes <= 0:
        return 0.0
    return target.state_bytes / load.download_bytes_s if load.download_bytes_s > 0 else math.inf
