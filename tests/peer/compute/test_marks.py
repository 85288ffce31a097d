"""Batches of which some tokens do not count: the loss is the mean over those that do, against torch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peer.compute.device import resolve_device
from peer.compute.model_trainer import ModelTrainer
from peer.compute.rank_trainer import RankTrainer
from peer.compute.train_loop import InnerRun, InnerTrainer, run_inner
from peer.errors import StageRefused
from peer.footprint.layout import Layout
from peer.footprint.step_size import StepSize
from peer.ipc.stage_spec import MicroBatch
from peer.model.decoder import Decoder
from peer.model.layout import init_flat
from peer.model.marks import counted, ids_of
from peer.parallel.ranks import Ranks
from tests.peer.compute.test_train_loop import INNER, MODEL
from tests.peer.support.stage_harness import MODEL as STAGED
from tests.peer.support.stage_harness import SPLITS, open_stages, relative, taken

CPU = resolve_device("cpu")


def batch(seed: int, share: float = 0.4, sequences: int = 4) -> Tensor:
    """Return tokens of which about that share counts."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MODEL.vocab_size, (sequences, 9), generator=chance)
    return torch.where(torch.rand(ids.shape, generator=chance) < share, ids, -1 - ids)


def one_device(size: int = 2) -> ModelTrainer:
    trainer = InnerTrainer(MODEL, INNER, CPU, StepSize(size))
    trainer.import_from(init_flat(MODEL, seed=0))
    trainer.take_marks()
    return trainer


def rank_of_one() -> ModelTrainer:
    trainer = RankTrainer(MODEL, INNER, CPU, Ranks(Layout(), 0, torch.device("cpu")), StepSize(2))
    trainer.import_from(init_flat(MODEL, seed=0))
    trainer.take_marks()
    return trainer


def exact(tokens: Tensor) -> tuple[float, Tensor]:
    """Return the mean loss over the tokens that count, and its gradient, by torch in float64."""
    model = Decoder(MODEL, init_flat(MODEL, seed=0).double())
    model.cos, model.sin = model.cos.double(), model.sin.double()
    ids = torch.where(tokens < 0, -1 - tokens, tokens)
    targets = torch.where(tokens[:, 1:] < 0, -100, tokens[:, 1:])
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    gradients = [parameter.grad for _, parameter in model.canonical_parameters() if parameter.grad is not None]
    return float(loss.detach()), torch.cat([gradient.flatten() for gradient in gradients])


def test_a_mark_hides_no_id() -> None:
    tokens = batch(1)
    assert counted(tokens) == int((tokens[:, 1:] >= 0).sum()) > 0
    assert bool((ids_of(tokens) >= 0).all()) and torch.equal(ids_of(ids_of(tokens)), ids_of(tokens))


@pytest.mark.parametrize("made", [one_device, rank_of_one])
def test_the_loss_is_the_mean_over_the_tokens_that_count(made: Callable[[], ModelTrainer]) -> None:
    tokens = batch(2)
    trainer = made()
    loss, gradient = exact(tokens)
    assert trainer._backward(tokens, ())[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(trainer.gradient.double(), gradient, rtol=1e-4, atol=1e-7)
    several = [batch(3, sequences=3), batch(4), batch(5, share=0.0)]
    parts = [(exact(one)[0], counted(one)) for one in several[:2]]
    mean = sum(loss * weight for loss, weight in parts) / sum(weight for _, weight in parts)
    assert trainer.evaluate(several, lambda: None) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("made", [one_device, rank_of_one])
def test_a_batch_in_which_nothing_counts_changes_nothing(made: Callable[[], ModelTrainer]) -> None:
    trainer, never = made(), made()
    for step, (seed, share) in enumerate(((1, 0.5), (2, 0.0), (3, 0.5))):
        outcome = trainer.step(batch(seed, share), step)
        assert outcome.counts == (share > 0) and not outcome.skipped
        if share:
            never.step(batch(seed, share), step)
    assert torch.equal(trainer.local, never.local)


def test_a_gradient_of_several_batches_weighs_each_by_the_tokens_that_count() -> None:
    trainer, batches = one_device(), [batch(1, 0.9), batch(2, 0.1), batch(3, 0.0)]
    trainer.begin_gradient()
    for one in batches:
        trainer.add_gradient(one)
    out = torch.zeros_like(trainer.local)
    trainer.mean_gradient(slice(0, len(out)), out)
    wanted = sum(exact(one)[1] * counted(one) for one in batches[:2]) / sum(map(counted, batches))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-7)


def test_a_run_tells_the_mean_loss_of_the_steps_in_which_something_counted() -> None:
    trainer, twin = one_device(), one_device()
    shares = {0: 0.5, 1: 0.0, 2: 0.5}

    def read(numbers: list[int]) -> Tensor:
        step = numbers[0] // 4
        return batch(step, shares[step])

    run = InnerRun(range(12), first_step=0, deadline_s=60.0, steps=None, stopped=lambda steps: False)
    result = run_inner(trainer, read, run)
    losses = [twin.step(batch(step, shares[step]), step).loss for step in (0, 2)]
    assert (result.steps, result.sequences, result.skipped) == (3, 12, 0)
    assert result.loss == pytest.approx(sum(losses) / 2)
    nothing = run_inner(
        one_device(), lambda numbers: batch(1, 0.0), run.__class__(range(4), 0, 60.0, None, run.stopped)
    )
    assert nothing.steps == 1 and math.isnan(nothing.loss)


@pytest.mark.parametrize("count", [1, 3])
def test_stages_have_the_mean_over_the_tokens_that_count(count: int) -> None:
    """Of three micro-batches of one step, in one of which none counts."""
    batches = [marked(1, 0.3), marked(2, 0.8), marked(3, 0.0)]
    chain = open_stages(SPLITS[count], marked=True)
    total = 0.0
    for number, tokens in enumerate(batches):
        x, seed, of = ids_of(tokens[:, :-1]), None, [(str(number), index, 0) for index in range(count)]
        for stage, name in zip(chain, of, strict=True):
            targets = tokens[:, 1:] if stage.spec.is_last else None
            x = stage.forward(MicroBatch(*name, targets=counted(tokens)), x, targets)
        total += float(x.sum())
        for stage, name in zip(reversed(chain), reversed(of), strict=True):
            seed = stage.backward(MicroBatch(*name, targets=counted(tokens)), seed)
    wide = Decoder(STAGED, init_flat(STAGED, seed=0).double())
    wide.cos, wide.sin = wide.cos.double(), wide.sin.double()
    together = torch.cat(batches)
    targets = torch.where(together[:, 1:] < 0, -100, together[:, 1:])
    loss = F.cross_entropy(wide(ids_of(together[:, :-1])).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    assert total / counted(together) == pytest.approx(float(loss.detach()), rel=1e-5)
    by_name = {name: parameter.grad for name, parameter in wide.canonical_parameters()}
    exact = torch.cat([by_name[name].flatten() for name in wide.layout.slots])  # type: ignore[union-attr]
    gradient, found = taken(chain)
    assert relative(gradient, exact) < 1e-5 and all(one.tokens == counted(together) for one in found)


def test_a_step_of_a_stage_in_which_nothing_counts_changes_nothing() -> None:
    (stage,) = open_stages(SPLITS[1], marked=True)
    before, tokens = stage.local.clone(), marked(3, 0.0)
    of = MicroBatch("a", 0, 0, targets=0)
    stage.forward(of, ids_of(tokens[:, :-1]), tokens[:, 1:])
    stage.backward(of)
    assert stage.step(0).micro_batches == ("a",) and torch.equal(stage.local, before)
    assert stage.optimizer.steps == 0


def test_marks_are_refused_where_a_run_has_none() -> None:
    (stage,) = open_stages(SPLITS[1])
    tokens = marked(3, 0.5)
    with pytest.raises(StageRefused, match="token ids lie in"):
        stage.forward(MicroBatch("a", 0, 0), ids_of(tokens[:, :-1]), tokens[:, 1:])


def marked(seed: int, share: float) -> Tensor:
    """Return tokens of which about that share counts, of the stages' model."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, STAGED.vocab_size, (3, 12), generator=chance)
    return torch.where(torch.rand(ids.shape, generator=chance) < share, ids, -1 - ids)
