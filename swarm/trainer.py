"""What a round needs of whoever trains: the seam between rounds and compute workers (tests and benchmarks plug in
here)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from optim.recipes.interface import Turn
from swarm.plan import Assignment


@dataclass(frozen=True)
class Work:
    """What a trainer did: `steps` inner steps on the first `samples` samples it was assigned, mean training `loss`
    (nats a token), and `product`, what the method asked for at the round's places, flat fp32, shape (m,): outer minus
    local weights, or the mean gradient. The buffer stays valid until the next call of `train`."""

    steps: int
    samples: int
    loss: float
    product: torch.Tensor


class Trainer(Protocol):
    """Trains one replica. `speed` is its measured rate in inner steps a second, 0 until known."""

    speed: float

    async def train(self, assignment: Assignment, turn: Turn, deadline_s: float) -> Work:
        """Do the assigned inner steps, the first of them being number `turn.step` of the run's schedule; stop at a step
        boundary when `deadline_s` is over. Cancelling it abandons the work. Raises `WorkerError` if the compute worker
        failed."""
        ...

    def wrap_up(self) -> None:
        """Let a running `train` return after the step it is in."""
        ...

    def adopt(self, theta: torch.Tensor) -> None:
        """Take over new outer weights, flat fp32, shape (P,)."""
        ...
