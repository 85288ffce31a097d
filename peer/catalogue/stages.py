"""The events that only pipelines have: stages, load, moves, samples and feeders."""

from __future__ import annotations

from typing import ClassVar

from peer.catalogue.happening import Happening, Who
from peer.figures import several


class BackupSaved(Happening, frozen=True):
    """The backup of another stage is on this disk."""

    told: ClassVar = ("stage", "round")
    stage: int
    round: int
    donors: int | None = None


class MoveStarted(Happening, frozen=True):
    """This peer moves to another stage."""

    told: ClassVar = ("source", "target", "gain")
    source: int
    target: int
    gain: float = 0.0
    """Micro-batches a second that the peer expects to gain."""
    reason: str = ""

    def sentence(self, teller: str, who: Who) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{teller} moves from stage {self.source} to {self.target}{why}"


class MoveFinished(Happening, frozen=True):
    told: ClassVar = ("target", "seconds")
    said: ClassVar = "{teller} works in stage {target} after {seconds:.0f} s"
    target: int
    seconds: float = 0.0


class PipelineLost(Happening, frozen=True):
    told: ClassVar = ("samples",)
    said: ClassVar = "{teller} gave up {samples} samples that a stage has lost"
    samples: int
    reason: str | None = None


class PipelineProgress(Happening, frozen=True):
    """Micro-batches that this source has dispatched, and what became of them."""

    dispatched: int
    completed: int
    retried: int
    abandoned: int


class PipelineRedispatched(Happening, frozen=True):
    told: ClassVar = ("samples", "round")
    said: ClassVar = "{teller} sent {samples} samples again that a stage has lost"
    samples: int
    round: int
    reason: str = ""


class PipelineRefused(Happening, frozen=True):
    """Samples that every replica refuses. A synchronous batch needs each of them."""

    first: int
    last: int
    """The one after the last."""
    cause: str
    reason: str
    synchronous: bool

    def sentence(self, teller: str, who: Who) -> str:
        samples, reason = f"samples {self.first} to {self.last - 1}", self.reason.rstrip(".")
        remedy = ": lower [inner] lr, or continue from an earlier checkpoint" if self.cause == "not_finite" else ""
        if not self.synchronous:
            return f"{teller} puts off {samples}, which every replica refuses ({reason}){remedy}"
        return f"{teller}: the batch cannot be completed while every replica refuses {samples} ({reason}){remedy}"


class PipelineResumed(Happening, frozen=True):
    told: ClassVar = ("stage",)
    said: ClassVar = "{teller} goes on: stage {stage} is served again"
    stage: int


class PipelineWaiting(Happening, frozen=True):
    told: ClassVar = ("stage",)
    said: ClassVar = "{teller} waits for stage {stage}"
    stage: int


class ReplicaOpened(Happening, frozen=True):
    said: ClassVar = "{teller} takes stage {stage}"
    stage: int


class StageLoad(Happening, frozen=True):
    """How busy this replica is."""

    queue: float
    rate: float
    """Micro-batches a second."""
    phase: str
    service_s: float = 0.0


class StagesMissing(Happening, frozen=True):
    """The stages without a replica at work have changed."""

    stages: tuple[str, ...]

    def sentence(self, teller: str, who: Who) -> str:
        missing = f"stage{'' if len(self.stages) == 1 else 's'} {', '.join(self.stages)}"
        return f"{teller} {f'waits for {missing}' if self.stages else 'sees all stages served'}"


class StageRestored(Happening, frozen=True):
    """This peer has begun a stage without replicas, from backups."""

    told: ClassVar = ("stage", "round")
    stage: int
    round: int
    donors: int = 0

    def sentence(self, teller: str, who: Who) -> str:
        backups = f", from the backups of {several(self.donors, 'peer')}" if self.donors else ""
        return f"{teller} restores stage {self.stage} at round {self.round}{backups}"


class TextFed(Happening, frozen=True):
    """What a feeder has read since it began, and the peers that have asked for text."""

    micro_batches: int
    peers: tuple[str, ...]
