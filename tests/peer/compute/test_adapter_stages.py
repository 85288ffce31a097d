"""An adapter that is trained in the stages of a pipeline, beside a base with a tied head."""

from __future__ import annotations

import msgspec
import pytest
import torch

from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import TARGETS, AdapterConfig
from peer.errors import StageRefused
from peer.footprint.parameters import base_of, frozen_shapes
from peer.ipc.stage_spec import MicroBatch
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import FlatLayout, init_flat, join_flat, split_flat
from tests.peer.support.stage_harness import (
    INNER,
    MODEL,
    SPLITS,
    backward,
    forward,
    open_stages,
    relative,
    token_batches,
)

TUNED = msgspec.structs.replace(MODEL, tie_embeddings=True, adapter=AdapterConfig(rank=3, alpha=6.0, targets=TARGETS))
INPUT = torch.zeros(1, 4, dtype=torch.int64)


def frozen() -> FrozenWeights:
    return FlatLayout.of(base_of(TUNED)).views(init_flat(base_of(TUNED), seed=1))


def start() -> torch.Tensor:
    """Return an adapter of which B is not zero."""
    return init_flat(TUNED, seed=2) + 0.02 * torch.randn(FlatLayout.of(TUNED).numel, generator=torch.manual_seed(4))


@pytest.mark.parametrize("recompute", [False, True])
def test_steps_of_the_stages_are_those_of_the_whole_model(recompute: bool) -> None:
    base, flat = frozen(), start()
    kept = {name: value.clone() for name, value in base.items() if isinstance(value, torch.Tensor)}
    chain = open_stages(SPLITS[3], TUNED, flat=flat, base=base, recompute=recompute)
    whole = InnerTrainer(TUNED, INNER, resolve_device("cpu"), base=base)
    whole.local.copy_(flat)
    for step in range(5):
        (tokens,) = token_batches(1)
        losses = forward(chain, str(step), tokens)
        backward(chain, str(step))
        outcome = whole.step(tokens, step)
        assert float(losses.mean()) == pytest.approx(outcome.loss, abs=1e-5)
        norm = float(torch.tensor([float(stage.gradient.mean().norm()) for stage in chain]).norm())
        for stage in chain:
            stage.step(step, norm=norm)
    parts = [torch.empty(stage.layout.numel) for stage in chain]
    for stage, part in zip(chain, parts, strict=True):
        stage.export(part)
    ours = join_flat(TUNED, parts, SPLITS[3])
    assert relative(ours - flat, whole.local - flat) < 1e-3 and not torch.equal(ours, flat)
    assert all(torch.equal(base[name], value) for name, value in kept.items())  # type: ignore[arg-type]


def test_only_the_last_stage_has_the_embedding_once_more() -> None:
    spans = SPLITS[3]
    wanted = [[name for name, _ in frozen_shapes(TUNED, span.blocks)] for span in spans]
    assert ["model.embed_tokens.weight" in names for names in wanted] == [True, False, True]
    assert all("lm_head.weight" not in names for names in wanted)
    assert {name for names in wanted for name in names} == {name for name, _ in frozen_shapes(TUNED)}


def test_the_base_is_not_counted_with_what_a_micro_batch_holds() -> None:
    """All its tensors lie in one storage, as in a mapped file."""
    large = torch.zeros(25 << 20)
    flat = init_flat(base_of(TUNED), seed=1)
    large[: len(flat)] = flat
    base = FlatLayout.of(base_of(TUNED)).views(large[: len(flat)])
    chain = open_stages(SPLITS[2], TUNED, flat=start(), base=base)
    forward(chain, "0", token_batches(1)[0])
    assert all(0 < stage.held.size_bytes < 4 << 20 for stage in chain)


def test_an_overflow_in_the_gradient_of_a_matrix_is_refused() -> None:
    """The norms beside it are frozen, so nothing else shows it in the first stage."""
    flat, base = init_flat(TUNED, seed=2), frozen()
    first = FlatLayout.of(TUNED, SPLITS[2][0]).views(split_flat(TUNED, flat, SPLITS[2])[0])
    first["model.layers.0.self_attn.o_proj.lora_A.weight"].fill_(1e18)
    value = base["model.layers.0.self_attn.v_proj.weight"]
    assert isinstance(value, torch.Tensor)
    value.mul_(1e3)
    stage = open_stages(SPLITS[2], TUNED, flat=flat, base=base)[0]
    gradient = torch.full_like(stage.forward(MicroBatch("0", 0, 0), INPUT), 1e16)
    with pytest.raises(StageRefused, match="not finite"):
        stage.backward(MicroBatch("0", 0, 0), gradient)
    assert not stage.gradient.counted
