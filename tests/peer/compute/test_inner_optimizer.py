"""Inner optimizers against torch's, or against the paper's formulas if torch has none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.inner_optimizer import AdamW, orthogonalized
from peer.compute.optimizer import InnerSpec
from peer.errors import ConfigError
from tests.optim.support.layouts import layout_of
from tests.optim.support.trajectory import STEPS, AdamWReference, Arrays, apart, gradient, initial


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


def test_adamw_equals_torch() -> None:
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


def test_lamb() -> None:
    """Algorithm 2 of the paper, phi the identity; a parameter that is zero has no size to scale by."""
    params = {**initial(), "zero": np.zeros(3)}
    layout = layout_of({n: torch.from_numpy(v) for n, v in params.items()})
    theta = flat(params)
    optimizer = build_inner(InnerSpec("lamb", lr=1e-2, weight_decay=0.1), layout, theta)
    m, v = ({n: np.zeros_like(p) for n, p in params.items()} for _ in range(2))
    for t in range(1, STEPS + 1):
        grads = {n: np.sin(np.arange(p.size).reshape(p.shape) + t) for n, p in params.items()}
        optimizer.step(theta, flat(grads))
        for n, g in grads.items():
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.95 * v[n] + 0.05 * g**2
            r = (m[n] / (1 - 0.9**t)) / (np.sqrt(v[n] / (1 - 0.95**t)) + 1e-8) + 0.1 * params[n]
            size = np.linalg.norm(params[n])
            params[n] = params[n] - 1e-2 * r * (size / np.linalg.norm(r) if size else 1.0)
        assert apart([{n: p.numpy() for n, p in layout.views(theta).items()}], [params]) < 1e-9


@pytest.mark.parametrize("shapes", [((64, 128),), ((64, 128), (40,), (100, 50))])
def test_eight_bit_adamw_equals_bitsandbytes(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Parameter by parameter, with its rule of which stay in fp32; and near AdamW."""
    tensors = {str(k): torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)}
    layout = layout_of(tensors)
    start = torch.cat([t.reshape(-1) for t in tensors.values()])
    theta = {kind: start.clone() for kind in ("adamw", "adamw8bit")}
    mine = {kind: build_inner(InnerSpec(kind, lr=1e-3), layout, theta[kind]) for kind in theta}  # type: ignore[arg-type]
    weights = [torch.nn.Parameter(t.clone()) for t in tensors.values()]
    bitsandbytes = importlib.import_module("bitsandbytes")
    theirs = bitsandbytes.optim.AdamW8bit(weights, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(20):
        g = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed + 9))
        for kind, optimizer in mine.items():
            optimizer.step(theta[kind], g)
        for weight, its in zip(weights, layout.views(g).values(), strict=True):
            weight.grad = its.clone()
        theirs.step()
    exact = torch.cat([weight.detach().reshape(-1) for weight in weights])
    moved = float((theta["adamw"] - start).norm())
    assert float((theta["adamw8bit"] - exact).norm()) < 1e-5 * moved
    assert 0 < float((theta["adamw"] - exact).norm()) < 0.1 * moved
    coded = sum(t.numel() for t in tensors.values() if t.numel() >= 4096)
    plain = layout.numel - coded
    assert len(mine["adamw8bit"].state) < 2.05 * coded + 8 * plain
    with pytest.raises(ConfigError, match="fp32 weights only"):
        build_inner(InnerSpec("adamw8bit"), layout, start.double())


def test_eight_bit_adamw_without_bitsandbytes_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        build_inner(InnerSpec("adamw8bit"), layout_of({"w": torch.zeros(4)}), torch.zeros(4))


def test_fused_adamw_equals_adamw_up_to_rounding() -> None:
    layout = layout_of({"w": torch.zeros(40, 30), "gain": torch.zeros(30)})
    spec = InnerSpec(lr=1e-2, weight_decay=0.3, decay="matrices")
    start = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    thetas = [start.clone(), start.clone()]
    optimizers = [AdamW(spec, layout, start), FusedAdamW(spec, layout, start)]
    for seed in range(20):
        g = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for optimizer, theta in zip(optimizers, thetas, strict=True):
            optimizer.step(theta, g)
    assert torch.allclose(thetas[0], thetas[1], rtol=0, atol=1e-13)
    assert torch.allclose(optimizers[0].state, optimizers[1].state, rtol=0, atol=1e-13)


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


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
def test_muon_equals_torch(monkeypatch: pytest.MonkeyPatch, scale: str, shape: tuple[int, int]) -> None:
    """In float64: torch's rounds to bf16 before it orthogonalizes, which is switched off for the comparison."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = start.clone().requires_grad_()
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale)
    theta = start.reshape(-1).clone()
    mine = build_inner(InnerSpec("muon", lr=0.1, muon_scale=scale), layout_of({"w": start}), theta)  # type: ignore[arg-type]
    for seed in range(1, 21):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        weight.grad = g.clone()
        theirs.step()
        mine.step(theta, g.reshape(-1))
        assert torch.allclose(theta.view(shape), weight.detach(), rtol=0, atol=1e-12)


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
