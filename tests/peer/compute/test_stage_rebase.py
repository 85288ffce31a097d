"""A stage that keeps learning during an exchange: captures, imports, and reads of the gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from peer.compute.device import resolve_device
from peer.compute.stage import Stage
from peer.errors import StageRefused
from peer.footprint.optimizer_state import saved_bytes
from peer.ipc.stage_spec import MicroBatch
from peer.model.layout import init_flat
from tests.peer.support.stage_harness import (
    INNER,
    MODEL,
    SPLITS,
    backward,
    forward,
    open_stages,
    relative,
    spec_of,
    token_batches,
    whole_gradient,
)

BOUND = 1e-5
BATCHES = token_batches(6)
WHOLE = SPLITS[1]
NEW = init_flat(MODEL, seed=1)


def learn(stage: Stage, *batches: int, epoch: int = 0) -> None:
    """Count these micro-batches; they are named by their numbers."""
    for k in batches:
        forward([stage], str(k), BATCHES[k], epoch)
        backward([stage], str(k), epoch)


def exact_sum(stage: Stage, *batches: int) -> torch.Tensor:
    """The mean gradient at the stage's present weights, in float64."""
    return whole_gradient(MODEL, stage.local, [BATCHES[k] for k in batches])[1]


def counts_again(stage: Stage, name: str, epoch: int) -> bool:
    """Whether the stage accepts the forward of this id."""
    micro_batch = MicroBatch(name, 0, epoch)
    try:
        stage.forward(micro_batch, BATCHES[0][:, :-1], BATCHES[0][:, 1:])
    except StageRefused as refused:
        assert refused.reason == "duplicate"
        return False
    return stage.drop(micro_batch.key)


def test_a_rebase_keeps_steps_since_the_capture() -> None:
    (stage,) = open_stages(WHOLE)
    outer, delta = stage.local.clone(), torch.empty_like(stage.local)
    learn(stage, 0)
    stage.step(0)
    stage.export(delta, outer, capture=True)
    captured = stage.local.clone()
    assert torch.equal(delta, outer - captured)
    learn(stage, 1)
    stage.step(1)
    learned = stage.local.clone()
    kept = saved_bytes(INNER.optimizer, stage.layout.shapes)
    states = [torch.zeros(kept, dtype=torch.uint8) for _ in range(2)]
    stage.optimizer.save(states[0])
    stage.import_weights(NEW, epoch=0, rebase=True)
    stage.optimizer.save(states[1])
    assert torch.equal(*states) and stage.optimizer.steps == 2

    exact = NEW.double() + (learned.double() - captured.double())
    assert relative(stage.local - NEW, learned.double() - captured.double()) < BOUND
    assert relative(stage.local, exact) < 1e-7
    assert torch.equal(stage.local, torch.from_numpy((learned.numpy() - captured.numpy()) + NEW.numpy()))
    learn(stage, 2)  # and on
    assert relative(stage.gradient.mean(), exact_sum(stage, 2)) < BOUND


def test_a_capture_serves_one_rebase() -> None:
    (stage,) = open_stages(WHOLE)
    out = torch.empty_like(stage.local)
    stage.import_weights(NEW, epoch=1, rebase=True)
    assert torch.equal(stage.local, NEW)

    stage.export(out, None, capture=True)
    assert torch.equal(out, NEW)
    stage.step(0, torch.ones_like(out))
    stage.export(out, None, capture=True)
    last = stage.local.clone()
    stage.export(out, None)  # no capture
    stage.step(1, torch.ones_like(out))
    moved = stage.local - last
    stage.import_weights(NEW, epoch=2, rebase=True)
    assert moved.any() and relative(stage.local - NEW, moved) < 1e-4
    stage.step(2, torch.ones_like(out))
    stage.import_weights(NEW, epoch=3, rebase=True)
    assert torch.equal(stage.local, NEW)  # it was used up

    stage.export(out, None, capture=True)
    stage.import_weights(last, epoch=4)
    stage.import_weights(NEW, epoch=5, rebase=True)
    assert torch.equal(stage.local, NEW)  # what came in between is no change since the capture


def test_a_rebase_keeps_the_gradient_and_recomputes_held_micro_batches() -> None:
    (stage,) = open_stages(WHOLE, staleness=1)
    out = torch.empty_like(stage.local)
    learn(stage, 0, 1)
    old = exact_sum(stage, 0, 1)
    forward([stage], "2", BATCHES[2])
    stage.export(out, None, capture=True)
    for epoch in (1, 2):  # the second leaves two epochs between the sum and the weights
        forward([stage], f"late {epoch}", BATCHES[3], epoch)
        stage.export(out, None, capture=True)
        moved = stage.import_weights(NEW, epoch=epoch, rebase=True)
        assert moved.uncounted == () and moved.expired == (() if epoch == 1 else ("2",))
    assert stage.read_gradient(out)
    assert relative(out, old) < BOUND
    for name in ("0", "1"):
        assert not counts_again(stage, name, epoch=2)  # they are still in the sum
    backward([stage], "late 1", epoch=1)
    tokens = [BATCHES[k][:, 1:].numel() for k in (0, 1, 3)]
    new = exact_sum(stage, 3)
    exact = (old * sum(tokens[:2]) + new * tokens[2]) / sum(tokens)
    assert stage.read_gradient(out).tokens == sum(tokens) and relative(out, exact) < BOUND

    moved = stage.import_weights(NEW, epoch=3)  # no rebase: one sum, some of it too old
    assert moved.uncounted == ("0", "1", "late 1") and not stage.gradient.flat.any()


def test_reading_the_gradient_keeps_it() -> None:
    (stage,) = open_stages(WHOLE)
    out = torch.empty_like(stage.local)
    for count in range(4):
        taken = stage.read_gradient(out)
        assert taken.micro_batches == tuple(map(str, range(count)))
        assert taken.tokens == sum(BATCHES[k][:, 1:].numel() for k in range(count))
        if count:
            assert relative(out, exact_sum(stage, *range(count))) < BOUND
            assert taken.norm == pytest.approx(float(out.norm()))
        else:
            assert not out.any()
        learn(stage, count)
    read = out.clone()
    assert stage.read_gradient(read) == stage.take_gradient(out) and torch.equal(read, out)
    assert stage.read_gradient(out).tokens == 0 and not out.any()


def test_which_ids_may_count_again() -> None:
    """Ids may count again once an import has replaced their weights, or a capture has exported them."""
    (stage,) = open_stages(WHOLE, staleness=1)
    out = torch.empty_like(stage.local)
    learn(stage, 0)
    stage.step(0)
    learn(stage, 1)
    stage.export(out, None, capture=True)
    stage.step(1)
    learn(stage, 2)
    stage.step(2)
    learn(stage, 3)
    assert [counts_again(stage, name, epoch=0) for name in "0123"] == [False] * 4
    stage.import_weights(NEW, epoch=1, rebase=True)
    assert [counts_again(stage, name, epoch=1) for name in "0123"] == [True, False, False, False]
    stage.import_weights(NEW, epoch=1)
    assert [counts_again(stage, name, epoch=1) for name in "0123"] == [True, True, True, False]
    stage.take_gradient(out)
    assert not counts_again(stage, "3", epoch=1)
    stage.import_weights(NEW, epoch=1)
    assert counts_again(stage, "3", epoch=1)


def test_a_stage_without_weights_refuses_to_export() -> None:
    stage = Stage(MODEL, INNER, resolve_device("cpu"), spec_of(WHOLE, 0))
    out = torch.ones_like(stage.local)
    calls: list[Callable[[], object]] = [
        lambda: stage.export(out, out, capture=True),
        lambda: stage.export(out),
        lambda: stage.read_gradient(out),
        lambda: stage.take_gradient(out),
    ]
    for call in calls:
        with pytest.raises(StageRefused) as caught:
            call()
        assert caught.value.reason == "no_weights"
    assert torch.equal(out, torch.ones_like(out))
