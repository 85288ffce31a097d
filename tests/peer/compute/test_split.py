"""Training with split weights beside fp32 and plain bf16 ones: deltas, losses, states, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
import torch

from peer.compute.device import resolve_device
from peer.compute.held_weights import SplitMaster
from peer.compute.optimizer import PIECE
from peer.compute.train_loop import InnerTrainer
from peer.config import AdapterConfig, InnerConfig, MasterType, ModelConfig
from peer.errors import ConfigError
from peer.footprint.optimizer_state import BLOCK, saved_bytes
from peer.footprint.step_size import StepSize
from peer.model.layout import FlatLayout, init_flat
from peer.model.split_weights import SplitVector
from tests.peer.devices import DEVICES

MODEL = ModelConfig(
    vocab_size=256, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48, max_seq_len=16, qk_norm=True
)
INNER = InnerConfig(lr=3e-3, batch_size=4, total_steps=100, warmup_steps=0, dtype="fp32", schedule="constant")
EVERYWHERE = slice(None)
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # qk_norm under autocast
torch.set_num_threads(1)  # on tensors this small a second thread only waits for the first


def batch(number: int) -> torch.Tensor:
    """Text with something to learn: each token follows from the last one, with noise."""
    draw = torch.Generator().manual_seed(number)
    rows = [torch.randint(0, 256, (4,), generator=draw)]
    for _ in range(16):
        noisy = torch.rand(4, generator=draw) < 0.1
        rows.append(torch.where(noisy, torch.randint(0, 256, (4,), generator=draw), (3 * rows[-1] + 1) % 64))
    return torch.stack(rows, dim=1)


def trainer(weights: MasterType, device: str = "cpu", **changes: object) -> InnerTrainer:
    inner = msgspec.structs.replace(INNER, **changes)
    made = InnerTrainer(MODEL, inner, resolve_device(device), weights=weights)
    made.import_from(init_flat(MODEL, seed=0))
    return made


def values_of(made: InnerTrainer) -> torch.Tensor:
    if isinstance(made.held, SplitMaster):
        return made.held.vector.read(EVERYWHERE).cpu()
    return made.local.cpu()


def delta_of(made: InnerTrainer, outer: torch.Tensor, at: slice = EVERYWHERE) -> torch.Tensor:
    out = torch.full_like(outer[at], 7.0)
    made.write_delta(outer, at, out)
    return out


def losses(made: InnerTrainer, steps: int) -> list[float]:
    return [made.step(batch(step), step).loss for step in range(steps)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# -- deltas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_no_step_gives_exactly_no_delta(device: str) -> None:
    """Although the weights are not the outer ones to the bit."""
    made, outer = trainer("split", device), init_flat(MODEL, seed=0)
    assert not torch.equal(values_of(made), outer)
    assert not delta_of(made, outer).any()
    made.step(batch(0), 0)
    assert delta_of(made, outer).any()
    made.import_from(outer)
    assert not delta_of(made, outer).any()


def test_a_step_that_moves_nothing_gives_exactly_no_delta() -> None:
    made, outer = trainer("split", lr=1e-12), init_flat(MODEL, seed=0)
    for step in range(3):
        assert made.step(batch(step), step).is_useful
    assert not delta_of(made, outer).any() and made.optimizer.steps == 3


def test_a_delta_is_what_the_steps_have_moved() -> None:
    made, outer = trainer("split"), init_flat(MODEL, seed=0)
    losses(made, 3)
    began = SplitVector.of(outer).read(EVERYWHERE)
    found = delta_of(made, outer)
    assert torch.equal(found, began - values_of(made)) and found.abs().max() > 1e-3
    assert torch.equal(delta_of(made, outer, slice(100, 300)), found[100:300])


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_outer_weights_are_mixed_in(alpha: float) -> None:
    made, other = trainer("split"), init_flat(MODEL, seed=1)
    losses(made, 2)
    before = values_of(made)
    made.mix(other, [(10, 20), (500, 900)], alpha)
    wanted = before.clone()
    for start, stop in ((10, 20), (500, 900)):
        wanted[start:stop] = alpha * before[start:stop] + (1 - alpha) * other[start:stop]
    assert torch.equal(values_of(made), SplitVector.of(wanted).read(EVERYWHERE))


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adamw", "fp32"),
        ("adamw8bit", "bf16"),
        pytest.param("adamw", "bf16", marks=pytest.mark.soak),
        pytest.param("adamw8bit", "fp32", marks=pytest.mark.soak),
    ],
)
def test_the_loss_is_that_of_fp32_weights(optimizer: str, dtype: str) -> None:
    split, whole = (trainer(weights, optimizer=optimizer, dtype=dtype) for weights in ("split", "fp32"))
    ours, theirs = losses(split, 60), losses(whole, 60)
    assert theirs[-1] < theirs[0] - 1.5
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.03
    assert abs(mean(ours[-20:]) - mean(theirs[-20:])) < 0.005


def test_bf16_weights_without_the_correction_learn_less() -> None:
    """At a rate whose steps are smaller than what bf16 rounds away."""
    split, whole, plain = (trainer(weights, lr=1e-4) for weights in ("split", "fp32", "split"))
    assert isinstance(plain.held, SplitMaster)
    ours, theirs, without = losses(split, 60), losses(whole, 60), []
    for step in range(60):
        without.append(plain.step(batch(step), step).loss)
        plain.held.vector.correction.zero_()
    gap = abs(mean(ours[-20:]) - mean(theirs[-20:]))
    assert gap < 0.003 and mean(without[-20:]) - mean(theirs[-20:]) > 10 * gap
    moved = [init_flat(MODEL, seed=0) - values_of(made) for made in (whole, split, plain)]
    far = [float((one - moved[0]).norm() / moved[0].norm()) for one in moved]
    assert far[1] < 0.05 < 0.3 < far[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_summed_in_fp32(device: str, dtype: str, recompute: str) -> None:
    """That of a batch in parts is that of the whole, as with fp32 weights of the same values."""
    made, whole = trainer("split", device, dtype=dtype), trainer("fp32", device, dtype=dtype)
    whole.import_from(made.local.float())
    made.resize(StepSize(1, recompute))  # type: ignore[arg-type]
    for one in (made, whole):
        one.begin_gradient()
        one.add_gradient(batch(0))
    assert made.gradient.dtype == torch.float32 and whole._gradient_sum is not None and made._gradient_sum is not None
    away = (made._gradient_sum - whole._gradient_sum).norm() / whole._gradient_sum.norm()
    assert 0 < float(away) < (4e-3 if dtype == "fp32" else 8e-3)
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in made.model.parameters())


def test_parts_of_a_parameter_are_moved_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PIECE % BLOCK == 0
    for optimizer in ("adamw", "adamw8bit"):
        whole, parts = (trainer("split", optimizer=optimizer) for _ in range(2))
        for step in range(3):
            whole.step(batch(step), step)
            with monkeypatch.context() as patched:
                patched.setattr("peer.compute.optimizer.PIECE", 2 * BLOCK)
                patched.setattr("peer.compute.held_weights.PIECE", 2 * BLOCK)
                parts.step(batch(step), step)
                found = delta_of(parts, init_flat(MODEL, seed=0))
        assert torch.equal(values_of(parts), values_of(whole))
        assert torch.equal(parts.optimizer.state, whole.optimizer.state)
        assert torch.equal(found, delta_of(whole, init_flat(MODEL, seed=0)))


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    made = trainer("split")
    assert isinstance(made.held, SplitMaster)
    made.step(batch(0), 0)
    made.local[5] = torch.nan
    before, state = values_of(made), made.optimizer.state.clone()
    assert made.step(batch(1), 1).skipped
    assert torch.equal(values_of(made).nan_to_num(7), before.nan_to_num(7))
    assert torch.equal(made.optimizer.state, state)
    made.import_from(init_flat(MODEL, seed=0))
    assert made.step(batch(1), 1).is_useful  # nothing is left of the gradient before


@pytest.mark.parametrize("device", DEVICES)
def test_validation_leaves_the_weights(device: str) -> None:
    made, other = trainer("split", device), trainer("fp32", device)
    losses(made, 2)
    before, outer = values_of(made), init_flat(MODEL, seed=1)
    other.import_from(outer)
    with made.holding(outer):
        found = made.evaluate([batch(0)], lambda: None)
    assert found == pytest.approx(other.evaluate([batch(0)], lambda: None), rel=1e-3)
    assert torch.equal(values_of(made), before) and made.step(batch(3), 3).is_useful


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_saved_state_continues_in_either_form(optimizer: str) -> None:
    """To the bit in the same form; and what one form has saved the other one continues with."""
    one = trainer("split", optimizer=optimizer)
    losses(one, 10)
    saved = torch.zeros(saved_bytes(optimizer, FlatLayout.of(MODEL).shapes), dtype=torch.uint8)
    one.save(saved)
    outer, found = init_flat(MODEL, seed=1), {}
    for name, weights in (("same", "split"), ("other", "fp32"), ("cold", "split")):
        found[name] = trainer(weights, optimizer=optimizer)  # type: ignore[arg-type]
        if name != "cold":
            found[name].load(saved)
    for made in (one, *found.values()):
        made.import_from(outer)
        for step in range(10, 14):
            made.step(batch(step), step)
    assert torch.equal(values_of(one), values_of(found["same"]))
    moved = outer - values_of(one)
    for name, least, most in (("other", 0.0, 0.03), ("cold", 0.2, 9.0)):
        assert least < float((values_of(one) - values_of(found[name])).norm() / moved.norm()) < most


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["lion", "lamb", "muon"])
def test_other_optimizers_are_refused_by_name(optimizer: str) -> None:
    with pytest.raises(
        ConfigError, match=f"works with adamw and adamw8bit, and the run's optimizer is {optimizer}: use"
    ):
        trainer("split", optimizer=optimizer)
    held = SplitVector.of(init_flat(MODEL, seed=0))
    made = trainer("fp32", optimizer=optimizer)
    with pytest.raises(ConfigError, match=f"{optimizer} cannot move split weights: use adamw"):
        made.optimizer.step_split(held, made.gradient)


def test_fp16_and_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match="this device computes in fp16"):
        trainer("split", dtype="fp16")
    adapted = msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=2, alpha=4.0))
    with pytest.raises(ConfigError, match="this run trains an adapter: use --weights fp32"):
        InnerTrainer(adapted, INNER, resolve_device("cpu"), base={}, weights="split")
