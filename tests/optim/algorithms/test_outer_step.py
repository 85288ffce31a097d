"""The outer step against torch's SGD and against a float64 formula; wrong variants must not pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.algorithms.outer_step import CHUNK, DilocoOuter

STEPS, NUMEL = 60, 257


def updates(seed: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(NUMEL, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def start() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def ours(outer: DilocoOuter) -> torch.Tensor:
    theta = start()
    velocity = torch.zeros_like(theta)
    for update in updates():
        outer.step(theta, velocity, update)
    return theta


def by_torch(momentum: float, nesterov: bool, dampening: float = 0.0) -> torch.Tensor:
    theta = start().requires_grad_()
    sgd = torch.optim.SGD([theta], lr=0.7, momentum=momentum, nesterov=nesterov, dampening=dampening)
    for update in updates():
        theta.grad = update.clone()
        sgd.step()
    return theta.detach()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_equals_torch_sgd(momentum: float, nesterov: bool) -> None:
    assert apart(ours(DilocoOuter(0.7, momentum, nesterov)), by_torch(momentum, nesterov)) < 1e-12


def test_equals_the_papers_formula() -> None:
    theta, m = start().numpy(), np.zeros(NUMEL)
    for update in updates():
        m = 0.9 * m + update.numpy()
        theta = theta - 0.7 * (update.numpy() + 0.9 * m)
    assert apart(ours(DilocoOuter()), torch.from_numpy(theta)) < 1e-12


def test_heavy_ball_and_dampening_differ() -> None:
    right = ours(DilocoOuter())
    assert apart(right, by_torch(0.9, nesterov=False)) > 1e-3
    assert apart(ours(DilocoOuter(nesterov=False)), by_torch(0.9, nesterov=False, dampening=0.9)) > 1e-3


def test_first_step_moves_by_lr_times_one_plus_momentum() -> None:
    theta, velocity = torch.zeros(3), torch.zeros(3)
    DilocoOuter().step(theta, velocity, torch.ones(3))
    assert theta.tolist() == pytest.approx([-1.33] * 3)
    assert velocity.tolist() == [1.0] * 3


def test_every_operation_is_rounded_separately() -> None:
    """Bit for bit what numpy's unfused fp32 arithmetic gives; a fused multiply-add would differ in some element."""
    generator = torch.Generator().manual_seed(5)
    theta, velocity, update = (torch.randn(100_000, generator=generator) for _ in range(3))
    t, v, u = theta.numpy().copy(), velocity.numpy().copy(), update.numpy()
    DilocoOuter().step(theta, velocity, update)
    v = v * np.float32(0.9) + u
    t = t - (v * np.float32(0.9) + u) * np.float32(0.7)
    assert np.array_equal(velocity.numpy(), v)
    assert np.array_equal(theta.numpy(), t)
    fused = velocity.double() * 0.9 + update.double()
    assert not np.array_equal(fused.float().numpy(), v * np.float32(0.9) + u)


def test_any_slice_can_be_stepped_alone() -> None:
    numel = 2 * CHUNK + 100
    generator = torch.Generator().manual_seed(6)
    theta, velocity, update = (torch.randn(numel, generator=generator) for _ in range(3))
    t, v, u = theta.clone(), velocity.clone(), update.clone()
    DilocoOuter().step(theta, velocity, update)
    for first, last in ((0, 7), (7, CHUNK + 50), (CHUNK + 50, numel)):
        DilocoOuter().step(t[first:last], v[first:last], u[first:last])
    assert torch.equal(t, theta)
    assert torch.equal(v, velocity)
    assert torch.equal(u, update)


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        DilocoOuter().step(torch.zeros(3), torch.zeros(3), torch.zeros(4))
