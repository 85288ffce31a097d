"""What ranks do together that only one of them knows. The other rank is a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from peer.compute.device import resolve_device
from peer.compute.rank_trainer import RankTrainer
from peer.compute.train_loop import InnerRun, InnerTrainer, run_inner
from peer.config import ComputeType
from peer.footprint.layout import Layout
from peer.footprint.step_size import StepSize
from peer.model.layout import init_flat
from peer.parallel.ranks import Ranks
from tests.peer.support.worker_harness import INNER, MODEL

BATCH = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Scripted(Ranks):
    """A rank beside one that adds the values of `others`, in order, and then what this one does."""

    others: list[tuple[float, ...]] = field(default_factory=list)

    def sum(self, values: Sequence[float]) -> list[float]:
        other = self.others.pop(0) if self.others else tuple(map(float, values))
        return [mine + its for mine, its in zip(values, other, strict=True)]

    def sum_over_replicas(self, vector: Tensor) -> None:
        vector.mul_(2)


def trainer(
    *others: tuple[float, ...],
    rank: int = 0,
    layout: Layout = Layout(replicate=2),  # noqa: B008
    dtype: ComputeType = "fp32",
) -> RankTrainer:
    ranks = Scripted(layout, rank, torch.device("cpu"), others=list(others))
    made = RankTrainer(MODEL, replace(INNER, dtype=dtype), resolve_device("cpu"), ranks, StepSize(2))
    made.import_from(init_flat(MODEL, seed=0))
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_halve_where_one_has_no_memory_left(rank: int) -> None:
    mine, told = trainer((0.0, 1.0), rank=rank), list[StepSize]()
    mine.on_smaller = told.append
    before = mine.local.clone()
    mine.step(BATCH, 5)
    assert mine.step_size == StepSize(1) and told == [StepSize(1)] * (rank == 0)
    assert not torch.equal(mine.local, before)


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_all_ranks_leave_out_a_step_that_overflows_at_one(norm: float) -> None:
    mine = trainer((0.0, 0.0), (norm,), dtype="fp16")
    before, scale = mine.local.clone(), mine.scale
    outcome = mine.step(BATCH, 5)
    assert outcome.overflowed and not outcome.skipped
    assert mine.scale == scale / 2 and torch.equal(mine.local, before) and mine.optimizer.steps == 0
    assert mine.step(BATCH, 5).is_useful and not torch.equal(mine.local, before)


def test_a_rank_without_memory_says_so_and_repeats_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, calm = trainer((1.0, 0.0)), trainer()
    compute, sizes = mine._model.add_up, list[int | None]()

    def add_up(tokens: Tensor, rows_at_once: int | None = None, samples: Sequence[int] = ()) -> float:
        sizes.append(rows_at_once)
        if rows_at_once == 2:
            raise torch.OutOfMemoryError
        return compute(tokens, rows_at_once)

    monkeypatch.setattr(mine._model, "add_up", add_up)
    mine.step(BATCH, 5)
    calm.resize(StepSize(1))
    calm.step(BATCH, 5)
    assert sizes == [2, 1] and torch.equal(mine.local, calm.local)


def test_a_rank_of_a_cut_model_ends_its_group_for_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, told = trainer(), list[StepSize]()
    cut = Scripted(Layout(shard=2), 1, torch.device("cpu"))
    mine._ranks, mine.on_smaller = cut, told.append

    def add_up(tokens: Tensor, rows_at_once: int, samples: Sequence[int]) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(mine._model, "add_up", add_up)
    with pytest.raises(torch.OutOfMemoryError):
        mine.step(BATCH, 5)
    assert told == [StepSize(1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_ends_a_run_for_all(rank: int) -> None:
    """Three steps here, as it is asked before each of them; the wish of the other one does not count."""
    wishes = [0.0, 0.0, 0.0, 1.0 * (rank == 1)]
    step = [(0.0, 0.0), (0.0,)]
    mine = trainer(*[one for wish in wishes for one in ((wish,), *step)], rank=rank)
    run = InnerRun(
        numbers=range(100),
        first_step=0,
        deadline_s=3600.0,
        steps=None,
        stopped=lambda steps: steps >= (3 if rank == 0 else 1),
    )
    assert run_inner(mine, lambda numbers: BATCH[: len(numbers)], run).steps == 3


def test_one_device_and_a_rank_of_one_are_alike() -> None:
    alone = InnerTrainer(MODEL, INNER, resolve_device("cpu"), StepSize(2))
    alone.import_from(init_flat(MODEL, seed=0))
    ranks = Ranks(Layout(), 0, torch.device("cpu"))
    mine = RankTrainer(MODEL, INNER, resolve_device("cpu"), ranks, StepSize(2))
    mine.import_from(init_flat(MODEL, seed=0))
    for step in range(3):
        assert alone.step(BATCH, step).loss == pytest.approx(mine.step(BATCH, step).loss, rel=1e-6)
    torch.testing.assert_close(alone.local, mine.local, rtol=1e-6, atol=1e-7)
