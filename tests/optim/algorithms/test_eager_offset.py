"""Eager updates as a shared state and a private offset, against the paper's own form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.algorithms.eager import EagerOffset
from optim.algorithms.outer_step import DilocoOuter
from tests.optim.reference.diloco import outer_step
from tests.optim.reference.eager import updates
from tests.optim.support.trajectory import K


@pytest.mark.parametrize("outer", [DilocoOuter(0.3, 0.5), DilocoOuter(0.7, 0.9, nesterov=False), DilocoOuter(1.0, 0.0)])
def test_shared_state_and_offset_are_the_papers_weights(outer: DilocoOuter) -> None:
    """float64, 40 rounds of one step by workers with different goals."""
    n = 30
    pull = torch.linspace(0.1, 1.0, n, dtype=torch.float64)
    goals = [torch.randn(n, dtype=torch.float64) for _ in range(K)]
    start, kind = torch.randn(n, dtype=torch.float64), "nesterov" if outer.nesterov else "heavy ball"

    def delta(weights: torch.Tensor, k: int) -> torch.Tensor:
        return 0.1 * torch.tanh(pull * (weights - goals[k]))

    papers, moments, before = [start.numpy()] * K, [np.zeros(n)] * K, list[np.ndarray]()
    shared, velocity, flying = start.clone(), torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    offsets, begins = [EagerOffset(n, outer, torch.float64) for _ in range(K)], [start] * K
    for number in range(40):
        fresh = [delta(torch.from_numpy(papers[k]), k).numpy() for k in range(K)]
        for k, update in enumerate(updates(fresh, before)):
            papers[k], moments[k] = outer_step(papers[k], moments[k], update, kind, outer.lr, outer.momentum)
        before = fresh

        deltas = [delta(begins[k], k) for k in range(K)]
        if number:
            outer.step(shared, velocity, flying)
        flying = torch.stack(deltas).mean(0)
        begins = [shared + offset.advance(own, 1 / K) for offset, own in zip(offsets, deltas, strict=True)]
        for ours, theirs in zip(begins, papers, strict=True):
            assert np.abs(ours.numpy() - theirs).max() < 1e-12
    assert float((begins[0] - begins[1]).norm()) > 1e-3  # replicas do differ


def test_a_wrong_share_does_not_separate_replicas_permanently() -> None:
    offset = EagerOffset(5, DilocoOuter(0.3, 0.5))
    offset.advance(torch.ones(5), 0.9)
    for _ in range(60):
        last = offset.advance(torch.zeros(5), 0.1)
    assert float(last.abs().max()) < 1e-6
