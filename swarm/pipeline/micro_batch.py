"""One micro-batch on its way through a stage: the task, and its outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from torch import Tensor

from peer.model.marks import counted
from swarm.pipeline.duplicate_checks import DuplicateCheck
from swarm.pipeline.messages import Cause, ForwardOutcome
from swarm.protocol.ledger import Range

NOTHING: Final = memoryview(b"")


@dataclass(eq=False)
class MicroBatchTask:
    """One micro-batch that is to go through this stage and all later ones."""

    samples: Range
    epoch: int
    tokens: Tensor
    """(B, T + 1) int64, with marks (`peer.model.marks`)."""
    coded: memoryview | None = None
    """The coded hidden state; None on the first stage."""
    counts: bool = True
    """It is to be counted here if possible."""
    again: bool = False
    """It may have been counted before."""
    until: float = math.inf
    """When the caller gives up, in trio's time."""
    check: DuplicateCheck = field(default_factory=DuplicateCheck)
    own_s: float = 0.0
    """Seconds on the device and in coding, so far."""
    queued_s: float = 0.0
    """Seconds waiting for either, so far."""

    @cached_property
    def targets(self) -> int:
        """How many of its tokens count in the loss."""
        return counted(self.tokens)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1] - 1


@dataclass(frozen=True)
class MicroBatchResult:
    """The outcome of a micro-batch, at this and all later stages."""

    outcome: ForwardOutcome
    """Whether its gradient (for an evaluation, its loss) came back: "done" or why not."""
    cause: Cause = ""
    reason: str = ""
    """The cause in words."""
    begun: bool = False
    """It is not done, and later stages may have counted it."""
    counted: bool = False
    """It was counted at this stage."""
    loss: float = 0.0
    """Nats, summed over its tokens."""
    gradient: memoryview = NOTHING
    """That of its hidden state, coded."""
    downstream_s: float = 0.0
    """Everything at later stages."""
    waited_s: float = 0.0
    """Waiting for devices, here and at later stages."""
    retried: int = 0
    """Calls that were repeated, here and at later stages."""

    @property
    def done(self) -> bool:
        return self.outcome == "done"
