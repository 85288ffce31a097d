"""One of four real peers sends wrong updates of ordinary length; the others judge it by the loss, each for itself.

The problem is a quadratic: each honest delta leads a part of the way to a common target, plus noise of its own. A batch
of held-out text is another target close to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
import trio.testing

from optim.algorithms.outer_step import DilocoOuter
from optim.strategies.interface import OuterStrategy, RoundInfo
from peer.errors import WorkerError
from peer.events import EventLog
from swarm.protocol.head import Member
from swarm.protocol.plan import Assignment
from swarm.rounds.trainers.trainer import Point, TrainRequest
from swarm.rounds.trainers.worker_trainer import NOTHING, WorkerTrainer
from swarm.status.judged import ask_judged, judged_by
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.group import InventedTrainer

NUMEL, BATCHES = 20_000, 8
Delta = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def honest(theta: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return 0.3 * theta + 0.05 * noise


def flipped(theta: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return -honest(theta, noise)


def random(theta: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Noise of the right norm."""
    return noise * (honest(theta, noise).norm() / noise.norm())


async def losses_of(trainer: InventedTrainer, points: Sequence[Point]) -> list[list[float]]:
    weights, losses = torch.empty(NUMEL), []
    for write in points:
        write(weights)
        targets = (0.05 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(b)) for b in range(BATCHES))
        losses.append([float((weights - target).square().mean()) for target in targets])
    return losses


def unmoved(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    return torch.zeros(NUMEL)


def train_by(member: DrivenReplica, first: torch.Tensor, delta: Delta) -> None:
    """Have a member answer with deltas that depend on the weights at which it stands. `first`: those of round 0."""

    def deltas(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
        theta = first if member.trainer.theta is None else member.trainer.theta
        seed = sum(peer.encode()) * 1000 + first_step
        return delta(theta, torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)))

    member.trainer.deltas = deltas


@pytest.mark.slow
@pytest.mark.parametrize("lie", [flipped, *(pytest.param(lie, marks=pytest.mark.soak) for lie in (random, honest))])
async def test_a_member_whose_updates_make_the_loss_worse_is_put_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Delta
) -> None:
    monkeypatch.setattr(OuterStrategy, "check_by_loss", 1.0)
    monkeypatch.setattr(InventedTrainer, "losses_of", losses_of, raising=False)
    setting = GroupSetting(numel=NUMEL, codec="fp32", min_peers=4, outer=DilocoOuter(0.3, 0.0, False), work_s=0.05)
    async with open_driven_group(tmp_path, setting) as group:
        for number in range(4):
            train_by(await group.enter(unmoved), group.theta, honest if number else lie)
        liar, *others = group.members
        await group.until(lambda: all(member.head.has(liar.driver.me) for member in others))
        if lie is honest:
            await group.until_round(8)
            assert liar.head.has(liar.driver.me)
        else:
            await group.until(lambda: all(not member.head.has(liar.driver.me) for member in others))
        assert any(member.seen("contribution_checked") for member in others)
        assert all(member.head.has(one.driver.me) for member in others for one in others)
        left_out = {fact["peer"] for member in others for fact in judged(member) if fact["left_out"]}
        assert left_out == (set() if lie is honest else {liar.peer})
        said = await ask_judged(group.coordinator_host, [member.peer for member in others])
        assert said.keys() == {member.peer for member in others}
        told = judged_by(said, {member.peer for member in group.members})
        assert {one.peer for one in told if one.left_out_by} == left_out, "a client is told the same"


def judged(member: DrivenReplica) -> list[dict[str, Any]]:
    return [dict(event.fields) for event in member.seen("contribution_judged")]


def fill(value: float, out: torch.Tensor) -> None:
    out.fill_(value)


class Worker:
    """In place of a worker group: notes what stands in `delta` when it is evaluated."""

    def __init__(self) -> None:
        self.delta = torch.zeros(2)
        self.evaluated: list[list[float]] = []
        self.fails = False

    async def inner_steps(self, *_: object, **__: object) -> Any:
        self.delta.fill_(9.0)
        return NOTHING

    async def evaluate_delta(self, max_batches: int) -> list[float]:
        if self.fails:
            raise WorkerError("the worker is gone")
        self.evaluated.append(self.delta.tolist())
        return [float(self.delta.sum())] * 2


@pytest.mark.parametrize("fails", [False, True])
async def test_losses_are_measured_before_the_steps_of_a_round_that_is_not_cut_short(
    nursery: Any, autojump_clock: object, fails: bool
) -> None:
    worker = Worker()
    trainer = WorkerTrainer(cast(Any, worker), "delta", EventLog())
    found = SimpleNamespace(losses=None, error="")

    async def ask() -> None:
        try:
            found.losses = await trainer.losses_of([partial(fill, 1.0), partial(fill, 2.0)])
        except WorkerError as error:
            found.error = str(error)

    def request(cut_short: bool) -> TrainRequest:
        work = Assignment(Member("me", "s"), ((0, 8),), 2)
        return TrainRequest(work, RoundInfo(1, 0, 1.0), (slice(0, 2),), 1, 10.0, cut_short)

    nursery.start_soon(ask)
    await trio.testing.wait_all_tasks_blocked()
    await trainer.train(request(True))
    assert not worker.evaluated
    worker.fails = fails
    result = await trainer.train(request(False))
    await trio.testing.wait_all_tasks_blocked()
    assert result.product.tolist() == [9.0, 9.0], "the product is that of the steps"
    assert found.error if fails else found.losses == [[2.0, 2.0], [4.0, 4.0]]
    worker.fails = False
    await trainer.train(request(False))
    assert len(worker.evaluated) == (0 if fails else 2), "each question is answered once"
