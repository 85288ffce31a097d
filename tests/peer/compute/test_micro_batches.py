"""Steps in micro-batches, with recomputation, and where memory runs out: the same step with less at a time."""

from __future__ import annotations

import pytest
import torch

from peer.compute.device import resolve_device
from peer.compute.out_of_memory import is_out_of_memory
from peer.compute.train_loop import InnerTrainer
from peer.config import InnerConfig, ModelConfig
from peer.footprint.step_size import StepSize
from peer.footprint.workload import Recompute
from peer.model.layout import init_flat
from tests.peer.devices import DEVICES

MODEL = ModelConfig(vocab_size=64, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48, max_seq_len=16)
INNER = InnerConfig(lr=3e-3, batch_size=6, total_steps=100, warmup_steps=0, dtype="fp32")
TOKENS = torch.randint(0, 64, (6, 17), generator=torch.Generator().manual_seed(5))


def trainer(size: StepSize | None = None, device: str = "cpu") -> InnerTrainer:
    made = InnerTrainer(MODEL, INNER, resolve_device(device), size)
    made.local.copy_(init_flat(MODEL, seed=0))
    return made


def distance(value: torch.Tensor, other: torch.Tensor) -> float:
    return float((value - other).norm() / other.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sequences", [1, 4, 6])  # 4: the last micro-batch has two
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_product_is_that_of_the_whole_batch(sequences: int, recompute: Recompute, device: str) -> None:
    whole, parts = trainer(device=device), trainer(StepSize(sequences, recompute), device)
    one, two = whole.step(TOKENS, 0), parts.step(TOKENS, 0)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert distance(parts.gradient, whole.gradient) < 1e-5
    for made in (whole, parts):
        made.begin_gradient()
        made.add_gradient(TOKENS)
    assert whole._gradient_sum is not None and parts._gradient_sum is not None
    assert distance(parts._gradient_sum, whole._gradient_sum) < 1e-4  # at weights that Adam has moved
    assert parts.evaluate([TOKENS], lambda: None) == pytest.approx(whole.evaluate([TOKENS], lambda: None), rel=1e-4)


def test_where_memory_runs_out_the_step_is_repeated_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient has what was added before it failed; the repeated step must not count that twice."""
    whole, small = trainer(), trainer()
    told: list[StepSize] = []
    small.on_smaller = told.append
    plain, calls = small.model.losses, 0

    def failing(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        if len(targets) > 3 or calls == 3:  # the second one of the step with micro-batches of three, too
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")
        return plain(hidden, targets)

    monkeypatch.setattr(small.model, "losses", failing)
    one, two = whole.step(TOKENS, 0), small.step(TOKENS, 0)
    assert told == [StepSize(3), StepSize(1)] and small.step_size == StepSize(1)
    assert two.loss == pytest.approx(one.loss, rel=1e-6) and distance(small.gradient, whole.gradient) < 1e-5


def test_one_sequence_with_everything_recomputed_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(StepSize(2))
    told: list[StepSize] = []
    made.on_smaller = told.append

    def failing(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise MemoryError

    monkeypatch.setattr(made.model, "losses", failing)
    with pytest.raises(MemoryError):
        made.step(TOKENS, 0)
    assert told == [StepSize(1), StepSize(1, "selective"), StepSize(1, "full")]


def test_another_error_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()

    def failing(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(made.model, "losses", failing)
    with pytest.raises(RuntimeError, match="mat1"):
        made.step(TOKENS, 0)
    assert made.step_size == StepSize(6)


@pytest.mark.parametrize("device", DEVICES)
def test_validation_computes_with_other_weights_and_leaves_the_local_ones(device: str) -> None:
    made, reference = trainer(device=device), trainer(device=device)
    other = init_flat(MODEL, seed=1)
    before = made.local.clone()
    reference.local.copy_(other)
    with made.holding(other):
        found = made.evaluate([TOKENS], lambda: None)
    assert found == reference.evaluate([TOKENS], lambda: None) != made.evaluate([TOKENS], lambda: None)
    assert torch.equal(made.local, before) and torch.equal(other, init_flat(MODEL, seed=1))


def test_validation_takes_no_second_copy_of_the_weights() -> None:
    """The parameters look at the other vector, and back; gradients stay where they are."""
    made = trainer()
    other = init_flat(MODEL, seed=1)
    before = made.local.clone()
    with made.holding(other):
        assert made.model.head.data_ptr() == other.data_ptr()
        with_other = made.evaluate([TOKENS], lambda: None)
    assert torch.equal(made.local, before) and torch.equal(other, init_flat(MODEL, seed=1))
    assert made.model.head.data_ptr() == made.local.data_ptr()
    assert with_other != made.evaluate([TOKENS], lambda: None)
    made.step(TOKENS, 0)
    assert float(made.gradient.norm()) > 0 and not torch.equal(made.local, before)


@pytest.mark.parametrize(
    ("said", "ran_out"),
    [
        ("could not create a primitive", True),  # by a CPU with units for bf16
        ("could not create a primitive descriptor for a matmul primitive", False),
        ("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_what_says_that_memory_ran_out(said: str, ran_out: bool) -> None:
    assert is_out_of_memory(RuntimeError(said)) == ran_out
