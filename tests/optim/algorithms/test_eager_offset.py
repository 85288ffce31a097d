"""Eager updates as a shared state and a private offset, against the paper's own form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optim.algorithms.eager import EagerOffset
from optim.algorithms.outer_step import DilocoOuter
from tests.optim.reference.group import Group
from tests.optim.support.trajectory import K


@pytest.mark.parametrize("outer", [DilocoOuter(0.3, 0.5), DilocoOuter(0.7, 0.9, nesterov=False), DilocoOuter(1.0, 0.0)])
def test_shared_state_and_offset_are_the_papers_weights(outer: DilocoOuter) -> None:
    """float64, 40 rounds of one plain gradient step by workers with different goals."""
    n, lr, rounds = 30, 0.1, 40
    pull = torch.linspace(0.1, 1.0, n, dtype=torch.float64)
    goals = [torch.randn(n, dtype=torch.float64) for _ in range(K)]
    start = torch.randn(n, dtype=torch.float64)

    settings: dict[str, Any] = {"outer_lr": outer.lr, "outer_momentum": outer.momentum, "nesterov": outer.nesterov}
    group = Group("eager", {"w": start}, K, H=1, inner={"optimizer": "lion", "lr": lr, "weight_decay": 0.0}, **settings)
    signs = [torch.zeros(n, dtype=torch.float64) for _ in range(K)]  # Lion's momentum, by hand

    shared, velocity = start.clone(), torch.zeros(n, dtype=torch.float64)
    offsets = [EagerOffset(n, outer, torch.float64) for _ in range(K)]
    flying: torch.Tensor | None = None
    begins = [start.clone() for _ in range(K)]
    for _ in range(rounds):
        group.step([{"w": pull * (group.params(k)["w"] - goals[k])} for k in range(K)])
        deltas = []
        for k in range(K):
            gradient = pull * (begins[k] - goals[k])
            move = torch.sign(0.9 * signs[k] + 0.1 * gradient)
            signs[k] = 0.95 * signs[k] + 0.05 * gradient
            deltas.append(move * lr)
        if flying is not None:
            outer.step(shared, velocity, flying)
        flying = sum(deltas) / K  # type: ignore[assignment]
        begins = [shared + offset.advance(delta, 1 / K) for offset, delta in zip(offsets, deltas, strict=True)]
        for k in range(K):
            assert float((group.params(k)["w"] - begins[k]).abs().max()) < 1e-12
    assert float((begins[0] - begins[1]).norm()) > 1e-3  # replicas do differ


def test_a_wrong_share_does_not_separate_replicas_permanently() -> None:
    offset = EagerOffset(5, DilocoOuter(0.3, 0.5))
    offset.advance(torch.ones(5), 0.9)
    for _ in range(60):
        last = offset.advance(torch.zeros(5), 0.1)
    assert float(last.abs().max()) < 1e-6
