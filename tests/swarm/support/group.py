"""What tests of rounds train: invented gradients, under DiLoCo."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import get_codec
from optim.config import DilocoConfig
from optim.rules.interface import MergeRule
from optim.rules.registry import MEAN
from optim.strategies.dense import DenseFormat
from optim.strategies.diloco import DilocoStrategy
from optim.strategies.interface import OuterStrategy
from peer.config import InnerConfig
from peer.identity import Signed, open_body
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import count
from swarm.protocol.plan import CONTRIBUTION_KIND, Assignment, Contribution, WorkPlan, check_contribution, next_ledger
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult

Deltas = Callable[[str, int, Assignment], torch.Tensor]
BATCH, SEQ = 2, 8
NESTEROV = DilocoOuter(0.7, 0.9, True)


class Patient(AdaptiveTimeouts):
    """Timeouts long enough that no member is left out because this machine stood still for some seconds."""

    def __init__(self) -> None:
        super().__init__(timeout_floor_s=60.0)


def diloco(numel: int, codec: str, outer: DilocoOuter = NESTEROV, rule: MergeRule = MEAN) -> OuterStrategy:
    return DilocoStrategy(DenseFormat([[slice(0, numel)]], get_codec(codec), get_codec(codec), rule), outer)


def schedule_of(steps: int, batch_size: int = BATCH, seq_len: int = SEQ, compute_s_max: float = 60.0) -> RoundSchedule:
    """The schedule of a run of invented gradients: H inner steps, no schedule of the learning rate."""
    return RoundSchedule(
        DilocoConfig(steps=steps), InnerConfig(lr=1e-3, batch_size=batch_size, total_steps=1), seq_len, compute_s_max
    )


@dataclass
class InventedTrainer:
    """Returns `deltas(peer, first_step, assignment)` as the pseudo-gradient. From round `gated_from` on it waits for
    `gate`, if there is one, also where a leader asks to finish early."""

    peer: str
    deltas: Deltas
    speed: float = 10.0
    gate: trio.Event | None = None
    gated_from: int = 0
    waiting: bool = False  # at the gate
    exhausted: bool = False  # no work can come
    paused: bool = False  # as a `WorkerTrainer` that has been paused
    work_s: float = 0.0  # how long the work takes
    theta: torch.Tensor | None = None
    until_others_are_near: Callable[[int], Awaitable[None]] | None = None
    """Given the round, waits for peers that are on their way to it."""

    async def train(self, request: TrainRequest) -> TrainResult:
        assignment = request.assignment
        if self.paused:
            return TrainResult(0, 0, 0.0, torch.zeros(0))
        if self.gate is not None and request.round_info.round >= self.gated_from:
            self.waiting = True
            try:
                await self.gate.wait()
            finally:
                self.waiting = False
        await trio.sleep(self.work_s)
        if self.until_others_are_near is not None:
            await self.until_others_are_near(request.round_info.round)
        assert count(assignment.ranges) == assignment.steps * BATCH
        delta = self.deltas(self.peer, request.round_info.step, assignment)
        return TrainResult(assignment.steps, assignment.steps * BATCH, 1.0, delta)

    def hold(self, round: int, gate: trio.Event | None = None) -> None:
        """From that round on wait for a gate."""
        self.gate, self.gated_from = trio.Event() if gate is None else gate, round

    def finish_early(self) -> None:
        """Do nothing: what has begun ends as it would have."""

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        self.theta = theta.clone()

    def is_exhausted(self, round: int) -> bool:
        return self.exhausted

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()


def regrouped(head: Head, members: Iterable[Member], term: int) -> Head:
    """The first head of a term over the state of `head`."""
    return msgspec.structs.replace(head, term=term, previous=head.hash, members=tuple(sorted(members)))


def open_contribution(signed: Signed, plan: WorkPlan, slices: int, head: Head, schedule: RoundSchedule) -> Contribution:
    """Open and check a contribution, as `Succession.contribution` does."""
    body = open_body(signed, CONTRIBUTION_KIND, Contribution)
    check_contribution(body, plan, slices, head, schedule)
    return body


def committed(
    head: Head,
    plan: WorkPlan,
    merged: Sequence[Contribution],
    everyone: Sequence[Contribution],
    schedule: RoundSchedule,
) -> Head:
    """The head after a commit, as far as samples go."""
    ledger = next_ledger(head, plan, merged, everyone, schedule)
    return msgspec.structs.replace(head, round=head.round + 1, previous=head.hash, ledger=ledger)
