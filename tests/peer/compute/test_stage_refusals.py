"""Refusals of a stage, which must not change it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from peer.compute.device import resolve_device
from peer.compute.stage import Stage
from peer.errors import ConfigError, StageRefused
from peer.ipc.span import Span, spans_of
from peer.ipc.stage_spec import MicroBatch, StageSpec, Taken
from tests.peer.support.stage_harness import (
    INNER,
    MODEL,
    SHARED,
    SPLITS,
    backward,
    forward,
    open_stages,
    spec_of,
    token_batches,
)

TOKENS = token_batches(1)[0]
IDS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]
X = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
NAN = X.clone()
NAN[1, 2, 3] = torch.nan
HUGE = torch.full_like(X, 1e30)


def state(stage: Stage) -> tuple[object, ...]:
    """The state that a refusal must not change."""
    gathered = (stage.gradient.flat.sum().item(), tuple(stage.gradient.counted), stage.gradient.tokens)
    bits = (stage.local.sum().item(), *gathered, stage.optimizer.steps)
    return (*bits, stage.epoch, len(stage.held), tuple(stage._seen), stage._captured)


def refused(stage: Stage, reason: str, call: Callable[[], object]) -> None:
    before = state(stage)
    with pytest.raises(StageRefused) as caught:
        call()
    assert caught.value.reason == reason, caught.value
    assert state(stage) == before


def busy_chain(**changes: Any) -> list[Stage]:
    """Two stages that have counted "done" and hold "held"."""
    chain = open_stages(SPLITS[2], **changes)
    for name in ("done", "held"):
        forward(chain, name, TOKENS)
    backward(chain, "done")
    return chain


@pytest.mark.parametrize(
    ("name", "stage", "epoch", "x", "targets", "reason"),
    [
        ("new", 0, 0, X, TARGETS, "stage"),
        ("new", 1, 1, X, TARGETS, "epoch"),
        ("new", 1, -1, X, TARGETS, "epoch"),
        ("held", 1, 0, X, TARGETS, "duplicate"),
        ("done", 1, 0, X, TARGETS, "duplicate"),
        ("new", 1, 0, X[:, :, :31], TARGETS, "shape"),
        ("new", 1, 0, X[0], TARGETS, "shape"),
        ("new", 1, 0, X[:0], TARGETS[:0], "shape"),
        ("new", 1, 0, X.repeat(2, 1, 1), TARGETS.repeat(2, 1), "shape"),
        ("new", 1, 0, X.reshape(2, 32, 32), TARGETS.reshape(2, 32), "shape"),
        ("new", 1, 0, X, TARGETS[:3], "shape"),
        ("new", 1, 0, X, None, "shape"),
        ("new", 1, 0, X.double(), TARGETS, "dtype"),
        ("new", 1, 0, IDS, TARGETS, "dtype"),
        ("new", 1, 0, X, TARGETS.int(), "dtype"),
        ("new", 1, 0, X, TARGETS + 64, "value"),
        ("new", 1, 0, NAN, TARGETS, "not_finite"),
        ("new", 1, 0, HUGE, TARGETS, "not_finite"),
    ],
)
def test_bad_forwards(name: str, stage: int, epoch: int, x: Tensor, targets: Tensor | None, reason: str) -> None:
    last = busy_chain()[1]
    refused(last, reason, lambda: last.forward(MicroBatch(name, stage, epoch), x, targets))


def test_bad_token_ids() -> None:
    first = busy_chain()[0]
    micro_batch = MicroBatch("new", 0, 0)
    refused(first, "dtype", lambda: first.forward(micro_batch, X))
    refused(first, "shape", lambda: first.forward(micro_batch, IDS, TARGETS))
    refused(first, "shape", lambda: first.forward(micro_batch, IDS[0]))
    refused(first, "value", lambda: first.forward(micro_batch, IDS - 64))


def test_a_bad_gradient_leaves_the_micro_batch_held() -> None:
    chain = busy_chain()
    first, held = chain[0], MicroBatch("held", 0, 0)
    bad = ((NAN, "not_finite"), (1e18 * X, "not_finite"), (X[:3], "shape"), (X.half(), "dtype"), (None, "shape"))
    for gradient, reason in bad:
        refused(first, reason, partial(first.backward, held, gradient))
    refused(chain[1], "shape", lambda: chain[1].backward(MicroBatch("held", 1, 0), X))
    for name, reason in (("never", "unknown"), ("done", "unknown")):
        refused(first, reason, partial(first.backward, MicroBatch(name, 0, 0), X))
    backward(chain, "held")
    assert first.take_gradient(torch.empty(first.layout.numel)).micro_batches == ("done", "held")


def shut_block(block: int) -> Stage:
    """A first stage in whose `block` a gradient may overflow in the backward, while its output is finite."""
    first = open_stages(spans_of([(0, 2), (2, 4)]))[0]
    weights = first.layout.views(first.local)
    weights[f"model.layers.{block}.input_layernorm.weight"].zero_()
    for name in ("v_proj", "o_proj"):
        weights[f"model.layers.{block}.self_attn.{name}.weight"].fill_(1e5)
    first.forward(MicroBatch("held", 0, 0), IDS)
    return first


@pytest.mark.parametrize("block", [0, 1])
def test_an_overflow_in_backward_is_refused(block: int) -> None:
    """The graph serves once: a gradient that overflows uses it up, and the next one recomputes it."""
    plain, struck = shut_block(block), shut_block(block)
    held = MicroBatch("held", 0, 0)
    for _ in range(2):
        refused(struck, "not_finite", lambda: struck.backward(held, 1e10 * X))
    for stage in (plain, struck):
        stage.backward(held, X)
    assert plain.gradient.flat.any() and torch.equal(plain.gradient.flat, struck.gradient.flat)


def test_a_full_store_refuses_and_drops_nothing() -> None:
    by_count = open_stages(SPLITS[2], held_max=2)
    for name in "ab":
        forward(by_count, name, TOKENS)
    refused(by_count[0], "full", lambda: by_count[0].forward(MicroBatch("c", 0, 0), IDS))
    assert by_count[0].drop(("a", 0)) and not by_count[0].drop(("a", 0))
    by_count[0].forward(MicroBatch("c", 0, 0), IDS)
    refused(by_count[0], "unknown", lambda: by_count[0].backward(MicroBatch("a", 0, 0), X))
    backward(by_count, "b")

    size = open_stages(SPLITS[2])[0]
    size.forward(MicroBatch("a", 0, 0), IDS)
    assert size.held.size_bytes > IDS.nbytes + 4 * X.nbytes  # the graph is counted
    by_bytes = open_stages(SPLITS[2], held_max_bytes=int(2.5 * size.held.size_bytes))[0]
    for name in "ab":
        by_bytes.forward(MicroBatch(name, 0, 0), IDS)
    refused(by_bytes, "full", lambda: by_bytes.forward(MicroBatch("c", 0, 0), IDS))
    tight = open_stages(SPLITS[2], held_max_bytes=size.held.size_bytes + IDS.nbytes)[0]
    tight.forward(MicroBatch("a", 0, 0), IDS)
    refused(tight, "full", lambda: tight.forward(MicroBatch("b", 0, 0), IDS))  # not without its graph, either
    tiny = open_stages(SPLITS[2], held_max_bytes=IDS.nbytes - 1)[0]
    refused(tiny, "full", lambda: tiny.forward(MicroBatch("a", 0, 0), IDS))


def test_a_new_epoch_drops_old_micro_batches() -> None:
    chain = busy_chain(staleness=1)
    last = chain[1]
    weights = last.local.clone()
    moved = last.import_weights(weights, epoch=1)
    assert (moved.expired, moved.uncounted) == ((), ())  # one epoch away
    refused(last, "duplicate", lambda: last.forward(MicroBatch("done", 1, 1), X, TARGETS))
    refused(last, "epoch", lambda: last.backward(MicroBatch("held", 1, 1)))  # it went forward in epoch 0
    last.forward(MicroBatch("ahead", 1, 2), X, TARGETS)
    refused(last, "epoch", lambda: last.forward(MicroBatch("far", 1, 3), X, TARGETS))
    moved = last.import_weights(weights, epoch=2)
    assert (moved.expired, moved.uncounted) == (("held",), ("done",))
    assert not last.gradient.flat.any()
    refused(last, "epoch", lambda: last.backward(MicroBatch("held", 1, 0)))
    assert last.backward(MicroBatch("ahead", 1, 2)) is not None
    last.forward(MicroBatch("done", 1, 2), X, TARGETS)  # no longer the same: its epoch is over

    refused(last, "shape", lambda: last.import_weights(weights[:-1], epoch=3))
    refused(last, "not_finite", lambda: last.import_weights(weights * torch.inf, epoch=3))


def test_invalid_steps_are_refused() -> None:
    fresh = Stage(MODEL, INNER, resolve_device("cpu"), spec_of(SPLITS[2], 0))
    refused(fresh, "no_weights", lambda: fresh.forward(MicroBatch("a", 0, 0), IDS))
    refused(fresh, "no_weights", lambda: fresh.step(0))
    idle, busy = open_stages(SPLITS[2])[0], busy_chain()[0]
    refused(idle, "empty", lambda: idle.step(0))
    gradient = torch.ones(busy.layout.numel)
    refused(busy, "shape", lambda: busy.step(0, gradient[1:]))
    refused(busy, "not_finite", lambda: busy.step(0, gradient * torch.nan))
    refused(busy, "not_finite", lambda: busy.step(0, norm=float("nan")))
    taken = idle.take_gradient(gradient)
    assert (taken.micro_batches, taken.tokens, taken.norm) == ((), 0, 0.0) and not gradient.any()


@pytest.mark.parametrize("value", [torch.inf, 3e38])
def test_a_gradient_without_a_norm_is_refused_and_can_be_thrown_away(value: float) -> None:
    """No answer of a worker may carry such a norm."""
    stage = busy_chain()[0]
    stage.gradient.add(MicroBatch("x", 0, 0), 1, [torch.full_like(view, value) for view in stage.gradient._views])
    out = torch.empty(stage.layout.numel)
    refused(stage, "not_finite", lambda: stage.read_gradient(out))
    refused(stage, "not_finite", lambda: stage.step(0))
    taken = stage.take_gradient(out)
    assert "x" in taken.micro_batches and msgspec.msgpack.decode(msgspec.msgpack.encode(taken), type=Taken) == taken
    assert not stage.gradient.flat.any() and stage.read_gradient(out).norm == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": 1}, "number the stages from 0"),
        ({"span": SPLITS[2][1]}, "number the stages from 0"),
        ({"index": -1}, "number the stages from 0"),
        ({"slots": 0}, "slots is 0"),
        ({"staleness": -1}, "staleness"),
    ],
)
def test_invalid_specs_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StageSpec(**{"span": SPLITS[2][0], "index": 0, "max_tokens": 64, **changes})  # type: ignore[arg-type]


def test_models_that_cannot_be_split_are_refused() -> None:
    tied = MODEL.__class__(hidden_size=8, layers=4, heads=2, kv_heads=2, intermediate_size=8, max_seq_len=8)
    with pytest.raises(ConfigError, match="tie_embeddings = false"):
        spec_of(SPLITS[2], 0).check(tied)
    spec_of(SPLITS[1], 0).check(tied)
    with pytest.raises(ConfigError, match="hold 4 blocks and the model 8"):
        spec_of(SPLITS[2], 0).check(SHARED)
    with pytest.raises(ConfigError, match=r"multiples of model\.shared_blocks"):
        StageSpec(span=Span(0, 3, 8), index=0, max_tokens=1).check(SHARED)
