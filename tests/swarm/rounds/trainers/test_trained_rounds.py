"""Steps with a NaN or infinite loss: counted, told, and after some rounds the end of the peer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from optim.strategies.interface import RoundInfo
from peer.errors import Diverged
from peer.events import Event, EventLog
from peer.ipc.train_messages import InnerResult
from swarm.protocol.head import Member, genesis
from swarm.protocol.plan import Assignment, WorkPlan
from swarm.rounds.trainers.contribution import Contributor
from swarm.rounds.trainers.trained_rounds import DIVERGED_ATTEMPTS, DIVERGED_ROUNDS, TrainedRound, TrainedRounds
from swarm.rounds.trainers.trainer import TrainRequest
from swarm.rounds.trainers.worker_trainer import WorkerTrainer

ME = Member("me", "s")


class Worker:
    """In place of a worker group: each run gives the next of `results`."""

    def __init__(self, *results: InnerResult) -> None:
        self.results = list(results)
        self.delta = torch.zeros(4)
        self.val_loss = math.nan

    async def inner_steps(self, *_: object, **__: object) -> InnerResult:
        return self.results.pop(0)

    async def evaluate(self, max_batches: int) -> float:
        return self.val_loss


def result(steps: int, skipped: int, loss: float = math.nan) -> InnerResult:
    return InnerResult(steps=steps, sequences=steps, tokens=steps, loss=loss, seconds=1.0, skipped=skipped)


def trainer_of(*results: InnerResult) -> tuple[WorkerTrainer, list[Event]]:
    told: list[Event] = []
    return WorkerTrainer(cast(Any, Worker(*results)), "delta", EventLog(watch=told.append)), told


def request(number: int) -> TrainRequest:
    return TrainRequest(Assignment(ME, ((0, 8),), 2), RoundInfo(number, 0, 1.0), (slice(0, 4),), 1, 10.0)


async def test_the_loss_of_a_round_is_its_own() -> None:
    trainer, told = trainer_of(result(2, 1, 5.9), result(2, 2))
    await trainer.train(request(1))
    assert trainer.trained.of(1) == TrainedRound(1, 2, 1, 5.9) and trainer.trained.of(2) == TrainedRound(2)
    await trainer.train(request(2))
    assert trainer.trained.of(2) == TrainedRound(2, 2, 2, None), "not the 5.9 of the round before"
    facts = [(e.fields["round"], e.fields["loss"], e.fields["skipped"]) for e in told if e.name == "round_trained"]
    assert facts == [(1, 5.9, 1), (2, None, 2)]
    (warning,) = (event.fields for event in told if event.name == "steps_skipped")
    assert warning["round"] == 2 and "lower [inner] lr" in str(warning["reason"])


async def test_a_held_out_loss_of_nan_is_told_as_none() -> None:
    trainer, told = trainer_of()
    assert trainer.val_round == -1
    trainer.validate_round = 3
    await trainer.validate()
    assert trainer.val_round == 3
    assert [event.fields for event in told] == [{"round": 3, "loss": None}]


async def test_what_overflows_in_fp16_is_no_divergence() -> None:
    """Rounds of nothing else end no peer, and no warning is told."""
    rounds = 2 * DIVERGED_ROUNDS
    all_of_it = InnerResult(2, 2, 2, math.nan, 1.0, skipped=0, overflows=2)
    half_of_it = InnerResult(2, 2, 2, 5.9, 1.0, skipped=0, overflows=1)
    trainer, told = trainer_of(*[all_of_it] * rounds, half_of_it)
    for number in range(1, rounds + 2):
        assert (await trainer.train(request(number))).overflows == (2 if number <= rounds else 1)
    assert trainer.trained.last == TrainedRound(rounds + 1, 2, 0, 5.9, overflows=1)
    facts = [(e.fields["loss"], e.fields["overflows"]) for e in told if e.name == "round_trained"]
    assert facts == [(None, 2)] * rounds + [(5.9, 1)]
    assert not any(event.name == "steps_skipped" for event in told)


def test_only_rounds_in_a_row_count_and_each_once() -> None:
    trained = TrainedRounds(EventLog())
    for number in range(1, DIVERGED_ROUNDS):
        trained.note(number, 4, 4, math.nan)
        trained.note(number, 4, 4, math.nan)  # its plan was replaced
    trained.note(DIVERGED_ROUNDS, 4, 3, 2.0)
    for number in range(5, 4 + DIVERGED_ROUNDS):
        trained.note(number, 4, 4, None)
        trained.note(number, 0, 0, math.nan)  # cut short, which says nothing
    with pytest.raises(Diverged, match=r"lower \[inner\] lr in a new run") as raised:
        trained.note(9, 4, 4, None)
    assert raised.value.exit_code == 7


def test_a_round_that_is_repeated_is_told_once_and_not_for_ever() -> None:
    told: list[Event] = []
    trained = TrainedRounds(EventLog(watch=told.append))
    for _ in range(DIVERGED_ATTEMPTS - 1):
        trained.note(2, 6, 6, None)
    assert [event.name for event in told] == ["steps_skipped"]
    with pytest.raises(Diverged, match="in round 2 every step"):
        trained.note(2, 6, 6, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e13])
def test_a_loss_that_no_message_may_carry_is_none(loss: float) -> None:
    trained = TrainedRounds(EventLog())
    trained.note(1, 4, 0, loss)
    assert trained.last == TrainedRound(1, 4, 0, None)


async def test_a_peer_whose_training_has_diverged_submits_nothing_more(tmp_path: Path) -> None:
    """Other faults of the own work make an empty contribution, with which a peer stays for ever."""
    trainer, _ = trainer_of(*(result(2, 2) for _ in range(DIVERGED_ROUNDS)))
    head = genesis("run", b"s0" * 16)
    context = SimpleNamespace(me=ME, trainer=trainer, events=EventLog())
    contributor = Contributor(cast(Any, context))
    contributor._encode = lambda *_: None  # type: ignore[assignment,method-assign]
    context.identity = SimpleNamespace()
    coding = cast(Any, SimpleNamespace(places=(slice(0, 4),)))
    for number in range(1, DIVERGED_ROUNDS):
        await trainer.train(request(number))
    plan = WorkPlan(head.hash, DIVERGED_ROUNDS, 0, (Assignment(ME, ((0, 8),), 2),), 1.0)
    with pytest.raises(Diverged):
        await contributor.contribute(plan, RoundInfo(DIVERGED_ROUNDS, 0, 1.0), coding, False)
