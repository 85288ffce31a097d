"""Products in fp16: steps and stages against exact gradients, and what overflows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from peer.compute.device import Device, narrow_type, resolve_device
from peer.compute.stage import Stage
from peer.compute.train_loop import InnerRun, InnerTrainer, run_inner
from peer.errors import StageRefused
from peer.ipc.stage_spec import MicroBatch
from peer.ipc.train_messages import InnerResult
from peer.model.layout import init_flat
from peer.model.mixed_precision import REPEATS_MAX, SCALE, SCALE_MIN
from tests.peer.support.stage_harness import (
    INNER,
    MODEL,
    SPLITS,
    ExactPass,
    backward,
    first_gradient,
    forward,
    open_stages,
    relative,
    taken,
    token_batches,
    whole_gradient,
)

FP16 = msgspec.structs.replace(INNER, dtype="fp16", clip_norm=1e9)
CPU = resolve_device("cpu")
BOUND = 6e-3
"""Of the error of a gradient; fp16 rounds by 5e-4."""
OFTEN = (8, 13, 14, 17, 20, 24, 27)
"""Of the powers of two that a stage's scale may begin with: the least, those where it first overflows, and more."""
torch.set_num_threads(1)  # on tensors this small a second thread only waits for the first


def trainer(scale: float = SCALE, dtype: str = "fp16", **changes: object) -> InnerTrainer:
    inner = msgspec.structs.replace(FP16, dtype=dtype, **changes)
    made = InnerTrainer(MODEL, inner, CPU)
    init_flat(MODEL, seed=0, out=made.local)
    if made.scaler is not None:
        made.scaler.scale = scale
    return made


def tokens_of(numbers: list[int]) -> torch.Tensor:
    return torch.stack([torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(n)) for n in numbers])


def run(made: InnerTrainer, steps: int) -> InnerResult:
    run = InnerRun(range(4 * steps), first_step=0, deadline_s=600.0, steps=None, stopped=lambda steps: False)
    return run_inner(made, tokens_of, run)


@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize("sequences", [4, 3])
def test_a_gradient_has_no_scale_left(scale: float, sequences: int) -> None:
    """Also of several micro-batches, and as a product."""
    tokens = tokens_of([0, 1, 2, 3])
    made = trainer(scale)
    made.resize(msgspec.structs.replace(made.step_size, sequences=sequences))
    loss, exact = whole_gradient(MODEL, made.local, [tokens])
    made.begin_gradient()
    outcome = made.add_gradient(tokens)
    product = torch.empty_like(made.local)
    made.mean_gradient(slice(0, len(product)), product)
    assert outcome.is_useful and abs(outcome.loss - loss) < BOUND * loss
    assert 1e-7 < relative(product, exact) < BOUND
    before = made.local.clone()
    assert made.step(tokens, 0).is_useful and not torch.equal(made.local, before)
    assert made.local.dtype == made.gradient.dtype == torch.float32
    assert relative(made.gradient, exact) < BOUND


def test_the_loss_follows_that_of_fp32() -> None:
    fp16, fp32 = trainer(clip_norm=1.0), trainer(dtype="fp32", clip_norm=1.0)
    for _ in range(3):
        half, whole = run(fp16, 20), run(fp32, 20)
        assert half.overflows == half.skipped == 0 and half.steps == 20
        assert half.loss != whole.loss and math.isclose(half.loss, whole.loss, rel_tol=5e-3)


def test_steps_that_overflow_change_nothing_and_are_counted_apart() -> None:
    made = trainer(scale=2.0**40)
    start = made.local.clone()
    first = made.step(tokens_of([0]), 0)
    assert first.overflowed and not first.skipped and not first.is_useful and math.isfinite(first.loss)
    assert torch.equal(made.local, start) and made.optimizer.steps == 0
    result = run(made, 40)
    assert 10 < result.overflows < 30 and result.skipped == 0 and result.steps == 40
    assert made.optimizer.steps == 40 - result.overflows
    assert made.scale == 2.0 ** (40 - 1 - result.overflows)
    assert math.isfinite(result.loss)


def test_what_no_scale_helps_is_skipped_as_in_fp32() -> None:
    made, plain = trainer(), trainer(dtype="fp32")
    tries = int(math.log2(SCALE / SCALE_MIN))
    for one in (made, plain):
        one.local.fill_(math.nan)
    result = run(made, tries + 4)
    assert (result.overflows, result.skipped) == (tries, 4) and math.isnan(result.loss)
    assert (run(made, 3).overflows, run(plain, 3).skipped, run(plain, 3).overflows) == (0, 3, 0)


def test_a_product_leaves_out_what_overflowed() -> None:
    made, calm = trainer(scale=2.0**40), trainer(scale=1.0)
    product, exact = torch.empty_like(made.local), torch.empty_like(made.local)
    for one, out, batches in ((made, product, [[0, 1], [2, 3]]), (calm, exact, [[2, 3]])):
        one.begin_gradient()
        for numbers in batches:
            assert one.add_gradient(tokens_of(numbers)).overflowed == (numbers == [0, 1])
            one.scaler = None if one.scaler is None else type(one.scaler)(1.0)
        one.mean_gradient(slice(0, len(out)), out)
    assert torch.equal(product, exact) and exact.any()


@pytest.mark.parametrize(
    ("bf16", "fp16", "dtype", "narrow"),
    [
        (True, False, "auto", torch.bfloat16),
        (False, True, "auto", torch.float16),
        (False, False, "auto", None),
        (False, True, "fp32", None),
        (True, False, "fp16", torch.float16),
        (False, True, "bf16", torch.bfloat16),
    ],
)
def test_the_type_is_the_configured_or_the_devices(
    bf16: bool, fp16: bool, dtype: str, narrow: torch.dtype | None
) -> None:
    device = Device(torch.device("cpu"), bf16=bf16, compile=False, name="", fp16=fp16)
    assert narrow_type(device, msgspec.structs.replace(INNER, dtype=dtype)) == narrow


@pytest.mark.parametrize(("major", "narrow"), [(6, None), (7, torch.float16), (8, torch.bfloat16), (9, torch.bfloat16)])
def test_a_gpu_computes_in_what_it_has_units_for(
    monkeypatch: pytest.MonkeyPatch, major: int, narrow: torch.dtype | None
) -> None:
    found = SimpleNamespace(major=major, minor=0, total_memory=1 << 34, name="GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert narrow_type(resolve_device("cuda"), msgspec.structs.replace(INNER, dtype="auto")) == narrow


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "power", [power if power in OFTEN else pytest.param(power, marks=pytest.mark.soak) for power in range(8, 28)]
)
def test_stages_repeat_what_overflows_at_a_smaller_scale(power: int, recompute: bool) -> None:
    """From every scale on: from some of them it is the product of one weight alone that overflows. Each stage has its
    own scale, and nothing of it is in what it gives to others."""
    batches = token_batches(2)
    chain = open_stages(SPLITS[3], inner=FP16, recompute=recompute)
    for index, stage in enumerate(chain):
        assert stage.scaler is not None
        stage.scaler.scale = 2.0 ** (power + 3 * (index == 1))
    for k, tokens in enumerate(batches):
        forward(chain, str(k), tokens)
    for k in range(len(batches)):
        backward(chain, str(k))
    gradient, found = taken(chain)
    assert all(of_stage.micro_batches == ("0", "1") for of_stage in found)
    assert relative(gradient, first_gradient(batches)[1]) < BOUND
    for index, stage in enumerate(chain):
        assert stage.scaler is not None and stage.overflows <= REPEATS_MAX * len(batches)
        assert (stage.scaler.scale < 2.0 ** (power + 3 * (index == 1))) == (stage.overflows > 0)
    assert any(stage.overflows for stage in chain) == (power >= 14)


def test_a_gradient_that_no_scale_helps_is_refused_and_the_next_one_taken() -> None:
    first, last = open_stages(SPLITS[2], inner=FP16)
    batch = token_batches(1)[0]
    forward([first, last], "a", batch)
    gradient = last.backward(MicroBatch("a", 1, 0))
    assert gradient is not None
    with pytest.raises(StageRefused) as refused:
        first.backward(MicroBatch("a", 0, 0), torch.full_like(gradient, 1e16))
    assert refused.value.reason == "not_finite"
    assert first.scaler is not None and first.scaler.scale == SCALE
    assert not first.gradient.flat.any() and not first.gradient.counted
    first.backward(MicroBatch("a", 0, 0), gradient)
    assert relative(taken([first, last])[0], first_gradient([batch])[1]) < BOUND


def counted_passes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list that the scale of each backward pass of the stage comes to."""
    scales: list[float] = []
    compute = stage._present.gradients

    def counted(held: Any, root: Any, seed: Any, of_weights: bool, scale: float = 1.0) -> Any:
        scales.append(scale * held.shape.numel())
        return compute(held, root, seed, of_weights, scale)

    monkeypatch.setattr(stage._present, "gradients", counted)
    return scales


@pytest.mark.parametrize(("value", "passes"), [(1e4, 1), (1e8, 1), (1e16, 0), (1e30, 0)])
def test_a_huge_gradient_costs_one_backward_pass_at_most(
    monkeypatch: pytest.MonkeyPatch, value: float, passes: int
) -> None:
    """Its scale follows from its largest value, and is not that of the next micro-batch."""
    first, last = open_stages(SPLITS[2], inner=FP16)
    batch = token_batches(1)[0]
    forward([first, last], "a", batch)
    gradient = last.backward(MicroBatch("a", 1, 0))
    assert gradient is not None and first.scaler is not None
    scales = counted_passes(first, monkeypatch)
    huge = gradient * (value / float(gradient.abs().max()))
    if passes:
        first.backward(MicroBatch("a", 0, 0), huge)
        exact = ExactPass(first, first.local, batch[:, :-1])
        assert relative(first.gradient.flat, exact.backward(huge)[1]) < BOUND
    else:
        with pytest.raises(StageRefused):
            first.backward(MicroBatch("a", 0, 0), huge)
        assert not first.gradient.flat.any()
    assert len(scales) == passes and first.overflows == 0 and first.scaler.scale == SCALE


def test_a_backward_that_overflows_at_all_scales_is_repeated_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = open_stages(SPLITS[2], inner=FP16)
    weights = first.layout.views(first.local)
    weights["model.layers.0.input_layernorm.weight"].zero_()  # so what these two multiply is zero, forward
    for name in ("v_proj", "o_proj"):
        weights[f"model.layers.0.self_attn.{name}.weight"].fill_(6e4)
    forward([first, last], "a", token_batches(1)[0])
    gradient = last.backward(MicroBatch("a", 1, 0))
    scales = counted_passes(first, monkeypatch)
    with pytest.raises(StageRefused) as refused:
        first.backward(MicroBatch("a", 0, 0), gradient)
    assert refused.value.reason == "not_finite" and "not finite: send another" in str(refused.value)
    assert scales == [SCALE * 2.0**-power for power in (0, 1, 3, 7, 15)]
    assert first.overflows == 4 and first.scaler is not None and first.scaler.scale == SCALE


def test_a_loss_that_overflows_is_tried_on_where_the_last_one_ended() -> None:
    (stage,) = open_stages(SPLITS[1], inner=FP16)
    assert stage.scaler is not None
    stage.scaler.scale = 2.0**60
    batch = token_batches(1)[0]
    for name, scale in (("a", 2.0**45), ("b", 2.0**30)):
        stage.forward(MicroBatch(name, 0, 0), batch[:, :-1], batch[:, 1:])
        with pytest.raises(StageRefused):
            stage.backward(MicroBatch(name, 0, 0))
        assert stage.scaler.scale == scale
    stage.backward(MicroBatch("a", 0, 0))
    assert tuple(stage.gradient.counted) == ("a",) and 1.0 < stage.scaler.scale < 2.0**30
