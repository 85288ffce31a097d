"""What a round needs of whoever trains: the seam between rounds and compute workers (tests and benchmarks plug in
here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from optim.strategies.interface import RoundInfo
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Assignment

Claims = Mapping[str, Sequence[Range]]
"""What each peer says it has counted, by peer id."""


@dataclass(frozen=True)
class TrainResult:
    """What a trainer did: `steps` inner steps on the first `samples` samples it was assigned, mean training `loss`
    (nats a token), and `product`, what the method asked for at the round's places, flat fp32, shape (m,): outer minus
    local weights, or the mean gradient. The buffer stays valid until the next call of `train`. A stage of a pipeline
    names the samples that it `counted`, whoever was assigned them."""

    steps: int
    samples: int
    loss: float
    product: torch.Tensor
    counted: tuple[Range, ...] = ()


@dataclass(frozen=True)
class TrainRequest:
    """What a round asks of a trainer: `assignment`, as the `round_info` has it, the first inner step being number
    `round_info.step` of the run's schedule; the product is wanted at `places`. `peers` take part; compute ends at a
    step boundary when `deadline_s` is over. `cut_short`: the others have done theirs; what there is already is wanted,
    and no more."""

    assignment: Assignment
    round_info: RoundInfo
    places: tuple[slice, ...]
    peers: int
    deadline_s: float
    cut_short: bool = False


class Trainer(Protocol):
    """Trains one replica. `speed` is its measured rate in inner steps a second, 0 until known."""

    speed: float

    async def train(self, request: TrainRequest) -> TrainResult:
        """Do the work from the weights last adopted. Cancelling it abandons the work. Raises `WorkerError` if the
        compute worker failed."""
        ...

    def finish_early(self) -> None:
        """Let a running `train` return after the step it is in."""
        ...

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Take over the outer weights of `head`, flat fp32, shape (P,). `changed`: where a commit changed them; None:
        the state was replaced, and whatever was trained from the old one is void."""
        ...

    def has_run_dry(self, round: int) -> bool:
        """Whether no work may ever come for the round of that number, so that it is one with nothing to merge: at a
        later stage of a pipeline, at the end of the run."""
        ...

    async def gather(self, members: Sequence[str]) -> Claims | None:
        """The leader's part while `members` (peer ids) train: returns when all together have done what the round needs
        and are to wrap up, with what each says it has counted, if they were asked; never, where each knows by itself
        when it is done."""
        ...
