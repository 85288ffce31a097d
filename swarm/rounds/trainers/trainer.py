"""The interface between rounds and compute workers; tests and benchmarks implement it, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from optim.strategies.interface import RoundInfo
from peer.identity import Signed
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Assignment
from swarm.protocol.receipts import StageProof

Point = Callable[[torch.Tensor], None]
"""Writes weights to a vector (P,)."""


@dataclass(frozen=True)
class TrainResult:
    """The result of training in one round."""

    steps: int
    """Inner steps made."""
    samples: int
    """Samples trained on, the first of those assigned."""
    loss: float
    """Mean training loss, nats a token."""
    product: torch.Tensor
    """Outer minus local weights, or the mean gradient, as the method asks; at the round's places, flat fp32, shape
    (m,). The buffer stays valid until the next call of `train`."""
    counted: tuple[Range, ...] = ()
    """The samples that a pipeline's stage has counted, whether or not they were assigned to it."""
    receipts: tuple[Signed, ...] = ()
    """Of the stage before, for the samples counted."""
    stage_before: StageProof = ()
    """The proof that their signers are in the stage before."""
    first_stage: StageProof = ()
    """In the last round of a later stage: what proves the first stage's last head."""
    skipped: int = 0
    """Of a peer alone: the inner steps whose loss or gradient was NaN or infinite, which have changed nothing."""
    overflows: int = 0
    """Of a peer alone: the inner steps that fp16 had no room for, which have changed nothing either."""


@dataclass(frozen=True)
class TrainRequest:
    """A request to train in one round."""

    assignment: Assignment
    round_info: RoundInfo
    """The first inner step is number `round_info.step` of the run's schedule."""
    places: tuple[slice, ...]
    """Where the product is wanted."""
    peers: int
    """The number of peers in the round."""
    deadline_s: float
    """Seconds after which training ends at a step boundary."""
    cut_short: bool = False
    """Return the work done so far; the other peers have finished."""


class Trainer(Protocol):
    """Trains one replica."""

    speed: float
    """Measured inner steps a second; 0 until known."""

    async def train(self, request: TrainRequest) -> TrainResult:
        """Train from the weights last adopted. Cancelling the call abandons the work. Raises `WorkerError` if the
        compute worker failed, and `Diverged` if its steps have been of no use for several rounds."""
        ...

    def finish_early(self) -> None:
        """Let a running `train` return after its present step."""
        ...

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Adopt the outer weights of `head`, flat fp32, shape (P,). `changed`: where a commit changed them; None means
        that the state was replaced, which voids everything trained from the old one."""
        ...

    def is_exhausted(self, round: int) -> bool:
        """Return whether no work can come for that round: at a later stage of a pipeline, at the end of the run."""
        ...

    async def gather(self, members: Sequence[str]) -> Mapping[str, Sequence[Range]] | None:
        """Wait, as the leader, until `members` (peer ids) together have done the round's work. The list may change
        meanwhile.

        Returns the samples that each reports as counted, if they were asked. Never returns if each member's own
        assignment determines when it is done."""
        ...


@runtime_checkable
class MeasuresLosses(Protocol):
    """A trainer that can measure other weights than its own."""

    async def losses_of(self, points: Sequence[Point]) -> list[list[float]]:
        """Return the held-out losses of each point in nats a token, batch by batch, the same batches for all. Waits for
        a moment at which the worker has time. Raises `WorkerError`."""
        ...
