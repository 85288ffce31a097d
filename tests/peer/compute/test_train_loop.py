"""The inner loop against AdamW written out, with bad batches, late joiners and bounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch

from peer.compute.device import Device, resolve_device
from peer.compute.model_trainer import StepOutcome
from peer.compute.train_loop import InnerRun, InnerTrainer, learning_rate, run_inner
from peer.config import InnerConfig, ModelConfig
from peer.errors import ConfigError
from peer.footprint.optimizer_state import saved_bytes
from peer.ipc.train_messages import InnerResult
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout, init_flat
from tests.peer.model.reference_loss import next_token_loss

MODEL = ModelConfig(vocab_size=32, hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_seq_len=16)
INNER = InnerConfig(
    lr=3e-3, batch_size=4, total_steps=100, warmup_steps=10, weight_decay=0.2, clip_norm=0.5, dtype="fp32"
)
CPU = resolve_device("cpu")
torch.set_num_threads(1)  # on tensors this small a second thread only waits for the first


def _batch(numbers: list[int]) -> torch.Tensor:
    return torch.stack([torch.randint(0, 32, (9,), generator=torch.Generator().manual_seed(n)) for n in numbers])


def _trainer(**changes: object) -> InnerTrainer:
    trainer = InnerTrainer(MODEL, msgspec.structs.replace(INNER, **changes), CPU)
    init_flat(MODEL, seed=0, out=trainer.local)
    return trainer


def _run(trainer: InnerTrainer, stop: int, **changes: object) -> InnerResult:
    bounds: dict[str, object] = {"first_step": 0, "deadline_s": 60.0, "steps": None, "stopped": lambda steps: False}
    return run_inner(trainer, _batch, InnerRun(numbers=range(stop), **{**bounds, **changes}))  # type: ignore[arg-type]


def test_steps_equal_adamw_written_out() -> None:
    """Decoupled decay on matrices only, bias correction, clipping to the global norm, rate by schedule."""
    trainer = _trainer()
    reference = Decoder(MODEL, init_flat(MODEL, seed=0).double())
    reference.cos, reference.sin = reference.cos.double(), reference.sin.double()
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in reference.parameters()}
    for t in range(1, 13):
        tokens = _batch([4 * t + k for k in range(4)])
        trainer.step(tokens, step=t - 1)
        reference.zero_grad()
        next_token_loss(reference(tokens[:, :-1]), tokens).backward()
        gradients: list[Any] = [p.grad for p in reference.parameters()]
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.tensor(0.0)))
        scale = min(1.0, INNER.clip_norm / float(norm))
        lr = learning_rate(INNER, t - 1)
        with torch.no_grad():
            for p, (m, v) in state.items():
                assert p.grad is not None
                g = p.grad * scale
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.95).addcmul_(g, g, value=0.05)
                p.mul_(1 - lr * INNER.weight_decay * (p.dim() > 1))
                p.sub_(lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8))
    assert torch.allclose(trainer.local.double(), reference.flat, atol=2e-5)


def test_it_learns() -> None:
    trainer = _trainer(clip_norm=1.0, lr=1e-2)
    first = trainer.step(_batch([0, 1]), step=50).loss
    for _ in range(80):
        last = trainer.step(_batch([0, 1]), step=50).loss
    assert first > 3.2 and last < 1.0


def test_a_non_finite_step_changes_nothing_and_is_counted() -> None:
    trainer = _trainer()
    trainer.step(_batch([0, 1, 2, 3]), 0)
    trainer.local[5] = math.nan
    before = (trainer.local.clone(), trainer.optimizer.state.clone())
    result = _run(trainer, 8)
    assert (result.steps, result.skipped) == (2, 2) and math.isnan(result.loss)
    assert torch.equal(trainer.local.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(trainer.optimizer.state, before[1]) and trainer.optimizer.steps == 1
    trainer.local[5] = 0.0
    assert _run(trainer, 8).skipped == 0


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "lion", "lamb", "muon"])
def test_optimizer_state_moves_to_a_new_trainer(optimizer: str) -> None:
    """Restoring the weights, as every round does, keeps the state. A new worker restores it, to the bit."""
    model = msgspec.structs.replace(MODEL, vocab_size=256)  # 8-bit moments are for parameters of 4096 values and more
    config = msgspec.structs.replace(INNER, optimizer=optimizer)
    one, two, cold = (InnerTrainer(model, config, CPU) for _ in range(3))
    for trainer in (one, two, cold):
        init_flat(model, seed=0, out=trainer.local)
    _run(one, 40)
    layout = FlatLayout.of(model)
    saved = torch.full((saved_bytes(config.optimizer, layout.shapes),), 7, dtype=torch.uint8)
    one.optimizer.save(saved)
    two.optimizer.load(saved)
    again = torch.zeros_like(saved)
    two.optimizer.save(again)
    used = one.optimizer.state.view(torch.uint8).numel()
    assert torch.equal(saved[:used], again[:used]) and two.optimizer.steps == 10
    assert 0 <= saved.numel() - used - 8 < 8  # no memory for nothing
    init_flat(model, seed=0, out=one.local)
    for trainer in (one, two, cold):
        _run(trainer, 20, first_step=10)
    assert torch.equal(one.local, two.local) and not torch.equal(one.local, cold.local)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "lion", "lamb", "muon"])
def test_matrices_decay_gains_do_not(optimizer: str) -> None:
    """Where the gradient is zero, only decay moves: matrices shrink, gains stay."""
    trainer = _trainer(optimizer=optimizer)
    trainer.optimizer.step(trainer.local, torch.zeros_like(trainer.local))
    start = trainer.model.layout.views(init_flat(MODEL, seed=0))
    for name, parameter in trainer.model.canonical_parameters():
        assert bool((parameter.abs() <= start[name].abs()).all())
        assert torch.equal(parameter, start[name]) == (parameter.dim() == 1)


def test_gradient_sum_skips_non_finite_batches() -> None:
    trainer = _trainer()
    _run(trainer, 7, product="gradient")  # batches of 4 and 3
    gathered, whole = torch.empty_like(trainer.local), torch.empty_like(trainer.local)
    trainer.mean_gradient(slice(None), gathered)
    trainer.begin_gradient()
    trainer.add_gradient(_batch(list(range(7))))
    trainer.mean_gradient(slice(None), whole)
    assert torch.allclose(gathered, whole, atol=1e-6) and float(whole.norm()) > 2 * INNER.clip_norm
    assert torch.equal(trainer.local, init_flat(MODEL, seed=0)) and trainer.optimizer.steps == 0
    good = whole.clone()
    trainer.local[5] = math.nan
    assert trainer.add_gradient(_batch([9])).skipped
    trainer.mean_gradient(slice(None), whole)
    assert torch.equal(whole, good)


def test_the_schedule_follows_the_runs_step() -> None:
    rates = [learning_rate(INNER, step) for step in range(130)]
    assert rates[0] == pytest.approx(INNER.lr / 10) and rates[9] == rates[10] == INNER.lr
    assert rates[55] == pytest.approx(INNER.lr * 0.55) and rates[100] == rates[129] == pytest.approx(INNER.lr * 0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    constant = msgspec.structs.replace(INNER, schedule="constant")
    assert {learning_rate(constant, step) for step in (10, 99, 10_000)} == {INNER.lr}
    seen: list[tuple[int, float]] = []
    trainer = _trainer()

    def on_step(step: int, outcome: StepOutcome, so_far: InnerResult) -> None:
        seen.append((step, trainer.optimizer.lr))

    _run(trainer, 8, first_step=55, on_step=on_step)  # a late joiner
    assert seen == [(55, rates[55]), (56, rates[56])]


def test_it_consumes_samples_in_order_and_counts_them() -> None:
    trainer, taken = _trainer(), []

    def batch(numbers: list[int]) -> torch.Tensor:
        taken.append(numbers)
        return _batch(numbers)

    run = InnerRun(iter([3, 4, 9, 1, 2, 8]), 0, 60.0, None, stopped=lambda steps: False)
    result = run_inner(trainer, batch, run)
    assert taken == [[3, 4, 9, 1], [2, 8]]
    assert (result.steps, result.sequences, result.tokens) == (2, 6, 48)
    assert 3.0 < result.loss < 4.0


def test_it_ends_at_the_first_bound() -> None:
    assert _run(_trainer(), 100, steps=3).sequences == 12
    assert _run(_trainer(), 100, deadline_s=0.0).steps == 0
    assert math.isnan(_run(_trainer(), 100, deadline_s=0.0).loss)
    polls = iter([False, False, True])
    assert _run(_trainer(), 100, stopped=lambda steps: next(polls)).steps == 2


def test_bf16_follows_the_config_and_compile_the_user() -> None:
    bf16 = _trainer(dtype="bf16")
    fp32 = _trainer()
    tokens = _batch([0, 1, 2, 3])
    one, two = bf16.step(tokens, 0).loss, fp32.step(tokens, 0).loss
    assert one != two and math.isclose(one, two, rel_tol=1e-2)
    assert bf16.local.dtype == torch.float32 and not fp32.compiled
    for wanted in (False, True):
        assert (
            InnerTrainer(MODEL, INNER, Device(torch.device("cpu"), bf16=False, compile=wanted, name="")).compiled
            == wanted
        )


def test_missing_devices_are_refused() -> None:
    assert resolve_device("auto").torch.type in ("cpu", "cuda", "mps")
    for spec, words in (("cuda:99", "not on this machine"), ("quantum", "unknown"), ("meta", "not supported")):
        with pytest.raises(ConfigError, match=words):
            resolve_device(spec)
