"""What the events of peers say, put together: rows, commits and moves, of which views and reports are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class FeederRow:
    """What a feeder had read by `at`, and for which peers (ids); `told_at`: when people were last told. Unix time."""

    at: float
    micro_batches: int
    peers: tuple[str, ...]
    told_at: float


@dataclass
class GroupRow:
    """Where a group stands, as the coordinator sees it: the whole run (None) or one stage of a pipeline."""

    stage: int | None
    round: int = 0
    members: int = 0
    phase: str = "waiting for peers"
    complete: bool = False

    @property
    def name(self) -> str:
        return "the run" if self.stage is None else f"stage {self.stage}"


@dataclass
class Row:
    """The last known facts of one peer."""

    name: str
    phase: str = "starting"
    round: int = 0
    members: int = 0
    state_hash: str = ""
    loss: float | None = None
    val_loss: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    gone: str = ""  # why the process is no more
    stage: int | None = None  # of a pipeline
    queue: float = 0.0  # micro-batches that wait there
    rate: float = 0.0  # micro-batches a second; of a feeder, those it reads
    role: str = ""
    pipelined: bool = False  # whether it takes part in a pipeline
    fed: FeederRow | None = None
    stale: bool = False  # whether it was ever unable to hear of the others, or to tell them of itself


@dataclass
class CommitRow:
    """One committed round as one peer saw it."""

    round: int
    at: float
    state_hash: str
    fields: Fields

    @property
    def stage(self) -> int | None:
        """Of a pipeline."""
        return self.fields.get("stage")

    @property
    def term(self) -> int:
        """After a regroup the rounds that were lost are made again, in the next term."""
        return int(self.fields.get("term", 0))


@dataclass(frozen=True)
class MoveRow:
    """A peer that changed its stage. `gain`: micro-batches a second that it expected of it."""

    name: str
    at: float
    source: int
    target: int
    reason: str
    gain: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk; of a pipeline, of that stage."""

    round: int
    path: str
    stage: int | None = None
