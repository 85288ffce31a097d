"""Inner optimizers against torch's own where there is one, else against the paper's formulas; schedules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from optim.inner import InnerSpec, build_inner, orthogonalized
from optim.schedule import quadratic_steps, steps_by_speed
from optim.simulate import layout_of
from peer.errors import ConfigError
from tests.optim.trajectory import STEPS, AdamWReference, Arrays, apart, gradient, initial


def flat(arrays: Arrays) -> torch.Tensor:
    return torch.cat([torch.from_numpy(a).reshape(-1) for a in arrays.values()])


def ours(spec: InnerSpec) -> Iterator[tuple[int, Arrays]]:
    """After each step: the step and our weights."""
    params = initial()
    layout = layout_of({n: torch.from_numpy(v) for n, v in params.items()})
    theta = flat(params)
    optimizer = build_inner(spec, layout, theta)
    for step in range(1, STEPS + 1):
        views = {n: v.numpy() for n, v in layout.views(theta).items()}
        optimizer.step(theta, flat(gradient(0, step, views)))
        yield step, views


def test_adamw_is_torchs() -> None:
    spec = InnerSpec(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    tensors = {n: torch.from_numpy(v).requires_grad_() for n, v in initial().items()}
    adamw = torch.optim.AdamW(list(tensors.values()), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, mine in ours(spec):
        grads = gradient(0, step, {n: t.detach().numpy() for n, t in tensors.items()})
        for n, t in tensors.items():
            t.grad = torch.from_numpy(grads[n])
        adamw.step()
        assert apart([mine], [{n: t.detach().numpy() for n, t in tensors.items()}]) < 1e-11


def test_lion() -> None:
    params = initial()
    m = {n: np.zeros_like(v) for n, v in params.items()}
    for step, mine in ours(InnerSpec("lion", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.2)):
        for n, g in gradient(0, step, params).items():
            params[n] = params[n] - 1e-3 * (np.sign(0.9 * m[n] + 0.1 * g) + 0.2 * params[n])
            m[n] = 0.99 * m[n] + 0.01 * g
        assert apart([mine], [params]) < 1e-9


def test_eight_bit_adamw_stays_near_adamw_and_keeps_bytes() -> None:
    layout = layout_of({"w": torch.zeros(64, 128)})
    start = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    weights = {kind: start.clone() for kind in ("adamw", "adamw8bit")}
    optimizers = {k: build_inner(InnerSpec(k, lr=1e-3), layout, w) for k, w in weights.items()}  # type: ignore[arg-type]
    for seed in range(20):
        g = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed + 1))
        for kind, weight in weights.items():
            optimizers[kind].step(weight, g)
    moved = (weights["adamw"] - start).norm()
    assert 0 < float((weights["adamw"] - weights["adamw8bit"]).norm() / moved) < 0.1
    assert optimizers["adamw8bit"].state_dict()["state1"].dtype == torch.uint8
    with pytest.raises(ConfigError, match="fp32 weights only"):
        build_inner(InnerSpec("adamw8bit"), layout, start.double())


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Through the singular values: the iteration is an odd polynomial of each."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(x)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ v


def test_muon_orthogonalizes_block_matrices_and_leaves_the_rest_to_adamw() -> None:
    params, adamw = initial(), AdamWReference(lr=5e-3)
    m = {n: np.zeros_like(v) for n, v in params.items()}
    for step, mine in ours(InnerSpec("muon", lr=5e-3)):
        grads = gradient(0, step, params)
        by_adamw = {n: v.copy() for n, v in params.items()}
        adamw.step(by_adamw, grads)
        for n, g in grads.items():
            m[n] = 0.95 * m[n] + 0.05 * g
            if n not in ("blocks.0.w", "blocks.1.w"):
                params[n] = by_adamw[n]
                continue
            rows, columns = g.shape
            move = newton_schulz(0.05 * g + 0.95 * m[n]) * np.sqrt(max(1, rows / columns))
            params[n] = params[n] * (1 - 5e-3 * 0.1) - 5e-3 * move
        assert apart([mine], [params]) < 1e-9


def test_muons_momentum_and_scale_are_torchs() -> None:
    """torch's orthogonalizes in bf16: the same up to that."""
    start = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    weight = start.clone().requires_grad_()
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.1, momentum=0.95)
    theta = start.reshape(-1).clone()
    mine = build_inner(InnerSpec("muon", lr=0.1), layout_of({"w": start}), theta)
    for seed in range(1, 6):
        g = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        weight.grad = g
        theirs.step()
        mine.step(theta, g.reshape(-1))
    assert float((theta.view(8, 6) - weight.detach()).norm() / (start - weight.detach()).norm()) < 0.03


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_orthogonalized_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    singular = torch.linalg.svdvals(orthogonalized(x, 5))
    assert bool(((singular > 0.5) & (singular < 1.3)).all())


@pytest.mark.parametrize("kind", ["adamw", "lamb", "lion", "muon"])
def test_the_gradient_is_only_read(kind: str) -> None:
    layout = layout_of({"blocks.0.w": torch.zeros(4, 3)})
    theta, g = torch.ones(12), torch.arange(12.0)
    build_inner(InnerSpec(kind), layout, theta).step(theta, g)  # type: ignore[arg-type]
    assert torch.equal(g, torch.arange(12.0))
    assert not torch.equal(theta, torch.ones(12))


def test_quadratic_rule() -> None:
    assert quadratic_steps(4, 0.02, 0.01) == 4
    assert quadratic_steps(4, 0.031, 0.01) == 9
    assert quadratic_steps(4, 0.035, 0.01) == 12
    with pytest.raises(ConfigError, match="min_lr_share"):
        quadratic_steps(4, 0.02, 0.0)


def test_steps_by_speed() -> None:
    assert steps_by_speed(50, [1.0, 0.5, 0.251, 0.001]) == (50, 25, 12, 1)
    with pytest.raises(ConfigError, match="measure"):
        steps_by_speed(50, [1.0, 0.0])
