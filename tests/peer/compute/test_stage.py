"""A chain of stages against the whole model: losses, gradients, steps; exactly once."""

from __future__ import annotations

import msgspec
import pytest
import torch

from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.ipc.span import spans_of
from peer.ipc.stage_spec import MicroBatch
from peer.model.layout import init_flat, join_flat, split_flat
from tests.peer.support.stage_harness import (
    INNER,
    MODEL,
    SHARED,
    SPLITS,
    backward,
    first_gradient,
    forward,
    open_stages,
    relative,
    taken,
    token_batches,
    whole_gradient,
)

BOUND = 1e-5


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_chain_of_stages_equals_the_model(count: int, recompute: bool) -> None:
    """Six micro-batches of several sizes, their forwards and backwards interleaved and out of order."""
    chain = open_stages(SPLITS[count], recompute=recompute)
    batches = token_batches(6)
    losses = {}
    for order in ["f0", "f1", "f2", "b1", "f3", "b3", "f4", "b0", "f5", "b5", "b2", "b4"]:
        name, k = order[1:], int(order[1:])
        if order[0] == "f":
            losses[k] = forward(chain, name, batches[k])
        else:
            backward(chain, name)
    exact_loss, exact = first_gradient(batches)
    tokens = sum(loss.numel() for loss in losses.values())
    assert abs(float(sum(loss.sum() for loss in losses.values())) / tokens - exact_loss) < BOUND * exact_loss

    gradient, found = taken(chain)
    for stage, of_stage, part in zip(chain, found, split_flat(MODEL, gradient, SPLITS[count]), strict=True):
        assert of_stage.micro_batches == ("1", "3", "0", "5", "2", "4") and of_stage.tokens == tokens
        assert of_stage.norm == pytest.approx(float(part.norm()))
        assert stage.held.size_bytes == 0 and len(stage.held) == 0
        assert not stage.gradient.flat.any()
    assert relative(gradient, exact) < BOUND


def test_blocks_that_share_their_parameters_in_a_pipeline() -> None:
    stages = spans_of([(0, 4), (4, 8)])
    chain = open_stages(stages, SHARED)
    batches = token_batches(2)
    for k, tokens in enumerate(batches):
        forward(chain, str(k), tokens)
        backward(chain, str(k))
    assert relative(taken(chain)[0], first_gradient(batches, SHARED)[1]) < BOUND


def test_recomputation_is_bit_identical_and_holds_less() -> None:
    plain, lean = (open_stages(SPLITS[2], recompute=recompute) for recompute in (False, True))
    for tokens, name in zip(token_batches(3), "abc", strict=True):
        assert torch.equal(forward(plain, name, tokens), forward(lean, name, tokens))
    for one, other in zip(plain, lean, strict=True):
        assert other.held.size_bytes < one.held.size_bytes / 5
    for name in "cab":
        backward(plain, name)
        backward(lean, name)
    for one, other in zip(plain, lean, strict=True):
        assert torch.equal(one.gradient.flat, other.gradient.flat)


def test_a_graph_above_the_limit_is_recomputed() -> None:
    """With the same bits: for the first micro-batch of its shape, and for the next, whose graph size is known."""
    plain, tight = open_stages(SPLITS[2]), open_stages(SPLITS[2], held_max_bytes=20 << 10)
    for tokens, name in zip(token_batches(3)[::2], "ab", strict=True):
        assert torch.equal(forward(plain, name, tokens), forward(tight, name, tokens))
    for one, other in zip(plain, tight, strict=True):
        assert one.held.size_bytes > 2 * other.spec.held_max_bytes >= 2 * other.held.size_bytes > 0
    for name in "ba":
        backward(plain, name)
        backward(tight, name)
    for one, other in zip(plain, tight, strict=True):
        assert torch.equal(one.gradient.flat, other.gradient.flat) and one.gradient.flat.any()
        assert len(other.held) == other.held.size_bytes == 0


def test_steps_equal_those_of_the_model() -> None:
    """Each stage clips by the norm of the whole gradient, and follows the run's learning rate."""
    inner = msgspec.structs.replace(INNER, warmup_steps=3, clip_norm=0.5, lr=1e-3, eps=1e-3)
    trainer = InnerTrainer(MODEL, inner, resolve_device("cpu"))
    init_flat(MODEL, seed=0, out=trainer.local)
    chain = open_stages(SPLITS[3], inner=inner)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        batch = torch.randint(0, MODEL.vocab_size, (4, 17), generator=generator)
        trainer.step(batch, step)
        for name, part in enumerate(batch.split(2)):
            forward(chain, f"{step}.{name}", part)
            backward(chain, f"{step}.{name}")
        norm = torch.stack([stage.gradient.flat.norm() / 64 for stage in chain]).norm()
        assert norm > inner.clip_norm
        for stage in chain:
            moved = stage.step(step, norm=float(norm))
            assert moved.micro_batches == (f"{step}.0", f"{step}.1") and moved.epoch == 0
    weights = join_flat(MODEL, [stage.local for stage in chain], SPLITS[3])
    assert relative(weights - init_flat(MODEL, seed=0), trainer.local - init_flat(MODEL, seed=0)) < 1e-4
    assert relative(weights, trainer.local) < BOUND


def test_a_step_by_a_given_gradient_begins_an_epoch() -> None:
    inner = msgspec.structs.replace(INNER, optimizer="lion", weight_decay=0.0)
    (stage,) = open_stages(SPLITS[1], inner=inner)
    before = stage.local.clone()
    gradient = torch.randn(stage.layout.numel, generator=torch.Generator().manual_seed(0))
    kept = gradient.clone()
    moved = stage.step(0, gradient, epoch=1)
    assert (moved.epoch, moved.micro_batches, stage.epoch) == (1, (), 1)
    assert torch.equal(gradient, kept)  # it is the caller's
    assert torch.allclose(before - stage.local, inner.lr * gradient.sign(), atol=1e-6)


def test_forward_only_keeps_nothing() -> None:
    chain = open_stages(SPLITS[2])
    tokens = token_batches(1)[0]
    kept = forward(chain, "a", tokens)
    held = [stage.held.size_bytes for stage in chain]
    for _ in range(2):
        x = chain[0].forward(MicroBatch("a", 0, 0), tokens[:, :-1], keep=False)
        assert torch.equal(chain[1].forward(MicroBatch("a", 1, 0), x, tokens[:, 1:], keep=False), kept)
    assert [stage.held.size_bytes for stage in chain] == held


def test_a_late_backward_uses_the_new_weights() -> None:
    """The weights of all stages change between the forward and the backward, which drops the graph."""
    chain = open_stages(SPLITS[2], staleness=1)
    old, new = init_flat(MODEL, seed=0), init_flat(MODEL, seed=1)
    tokens = token_batches(1)[0]
    x = chain[0].forward(MicroBatch("a", 0, 0), tokens[:, :-1])
    chain[1].forward(MicroBatch("a", 1, 0), x, tokens[:, 1:])
    size = chain[1].held.size_bytes
    for stage, weights in zip(chain, (old, new), strict=True):  # the last stage alone moves on
        part = weights[: stage.layout.numel] if stage.spec.is_first else weights[-stage.layout.numel :]
        if not stage.spec.is_first:
            moved = stage.import_weights(part, epoch=1)
            assert (moved.expired, moved.uncounted) == ((), ())
    assert chain[1].held.size_bytes < size / 5
    backward(chain, "a")
    mixed = torch.cat([chain[0].local, chain[1].local])
    _, exact = whole_gradient(MODEL, mixed, [tokens])
    got = torch.cat([stage.gradient.flat for stage in chain]) / tokens[:, 1:].numel()
    assert relative(got, exact) < BOUND
