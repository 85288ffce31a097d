"""The rows that views and reports are made of: peers, groups, commits, moves and saved checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cli.progress.curve import LossCurve
from swarm.run.owners_pause import PAUSED

Fields = Mapping[str, Any]

STARTING: Final = "starting the worker"
"""The phase of a peer that is in the run and whose worker is not ready yet."""


def finite(value: object) -> float | None:
    """Return a number; None for one that is none: the log has null for NaN."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclass(frozen=True)
class FeederRow:
    """What a feeder has read so far. Times are Unix times."""

    at: float
    micro_batches: int
    peers: tuple[str, ...]
    """Ids of the peers that asked for text."""
    told_at: float
    """When a note about this feeder was last shown."""


@dataclass
class GroupRow:
    """One group as the coordinator sees it."""

    stage: int | None
    """None: the run has one group for the whole model."""
    round: int = 0
    members: int = 0
    phase: str = "waiting for peers"
    complete: bool = False
    left_out: int = 0
    """Contributions for which the fullest roster so far had no room."""

    @property
    def name(self) -> str:
        return "the run" if self.stage is None else f"stage {self.stage}"


@dataclass
class ComputePhase:
    """The local steps of one round. Times are Unix times."""

    first: int
    """The number of the first one in the run."""
    steps: int
    began_at: float
    done: int = 0
    at: float = 0.0
    """When the last one was told."""
    tokens_per_s: float = 0.0

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.steps) if self.steps else 0.0

    def left_s(self, now: float) -> float | None:
        """Return the seconds that the rest takes at the pace so far; None before the first step."""
        if not self.done or self.at <= self.began_at:
            return None
        ends_at = self.began_at + (self.at - self.began_at) * self.steps / self.done
        return max(0.0, ends_at - now)


@dataclass
class Row:
    """The last known facts of one peer."""

    name: str
    phase: str = "connecting"
    work: ComputePhase | None = None
    """The local steps of the round that it trains or trained last."""
    round: int = 0
    members: int = 0
    state_hash: str = ""
    loss: float | None = None
    """Of the last round or step; None where that has none that is a number."""
    val_loss: float | None = None
    val_round: int | None = None
    """The round of `val_loss`; None where that is not told."""
    curve: LossCurve = field(default_factory=LossCurve)
    """Of the training loss, since this process began."""
    device: tuple[str, ...] = ()
    """Where its worker computes, and how."""
    steps_per_s: float = 0.0
    """At a coordinator: of all peers that train together, as they say."""
    catches_up_until: float = 0.0
    """At a coordinator that was started again: Unix time until which it learns of rounds that were committed before."""
    told_round: int = 0
    """At a coordinator: the last round of which members have told."""
    useless_round: int = 0
    """The last round of which this peer could use no step; 0: none."""
    bytes_up: int = 0
    bytes_down: int = 0
    round_bytes_up: int = 0
    """What it sent in its last round."""
    paused: bool = False
    """Whether its owner has paused it."""
    gone: str = ""
    """Why the process has ended."""
    stage: int | None = None
    queue: float = 0.0
    """Micro-batches that wait at this peer."""
    rate: float = 0.0
    """Micro-batches a second: counted by a replica, read by a feeder."""
    role: str = ""
    pipelined: bool = False
    """Whether the peer takes part in a pipeline."""
    fed: FeederRow | None = None
    stale: bool = False
    """Whether the peer has ever lost touch with the other members' records."""
    serves: bool = False
    """Whether it serves the run's commits as well."""
    corpus: str = ""
    """What it has read of its machine's text, as it was last noted."""
    relays: dict[str, bool] = field(default_factory=dict)
    """Whether each relay that its owner named has a place for it, as it was last noted."""
    unsaved: bool = False
    """Whether its disk takes no records of the round that it stands at."""

    @property
    def doing(self) -> str:
        """What it does: under its owner's pause nothing, whatever its group does."""
        return PAUSED if self.paused else self.phase


@dataclass
class CommitRow:
    """One committed round as one peer saw it."""

    round: int
    at: float
    state_hash: str
    fields: Fields

    @property
    def stage(self) -> int | None:
        """Stage of a pipeline."""
        return self.fields.get("stage")

    @property
    def term(self) -> int:
        """Term of the commit. A regroup repeats lost rounds in the next term."""
        return int(self.fields.get("term") or 0)


@dataclass(frozen=True)
class MoveRow:
    """A peer's move to another stage."""

    name: str
    at: float
    source: int
    target: int
    reason: str
    gain: float
    """Micro-batches a second that the peer expected to gain."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    round: int
    path: str
    stage: int | None = None
