"""lion and allreduce, which exchange at every step, and PowerSGD, against the papers' formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.training.strategy_group import StrategyGroup
from optim.algorithms.lion import LionRule
from optim.config import AllReduceConfig, LionConfig
from optim.strategies.lion import LionStrategy
from peer.compute.optimizer import InnerSpec
from tests.optim.reference import lion
from tests.optim.reference.allreduce import ACCUMULATED, allreduce
from tests.optim.reference.powersgd import PowerSgdWorkers, orthonormal
from tests.optim.support.rounds import built, trained, weights
from tests.optim.support.trajectory import SHAPES, AdamWReference, K, apart, gradient, initial

CLOSE = 1e-6  # fp32, sixty steps


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_lion(short_slices: None, vote: str) -> None:
    method = LionConfig(b1=lion.B1, b2=lion.B2, vote=vote)  # type: ignore[arg-type]
    assert apart(weights(trained(built(method), 1, lr=lion.LR)), lion.lion(vote)) < CLOSE


@pytest.mark.parametrize("workers", [2, 3, 6, 7])
def test_a_tie_of_votes_moves_nothing(workers: int) -> None:
    init = {"w": torch.zeros(2)}
    group = StrategyGroup(lambda: LionStrategy(2, LionRule(), True), init, workers, 1, InnerSpec(lr=0.1))
    group.step([{"w": torch.tensor([1.0 if k % 2 else -1.0, 1.0])} for k in range(workers)])
    tied = 0.0 if workers % 2 == 0 else 0.1
    assert group.params(0)["w"].tolist() == pytest.approx([tied, -0.1])


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_allreduce_is_one_process_with_the_whole_batch(short_slices: None, optimizer: str) -> None:
    method = AllReduceConfig(batch=16, optimizer=optimizer)  # type: ignore[arg-type]
    assert apart(weights(trained(built(method), ACCUMULATED)), allreduce(optimizer)) < CLOSE


def test_powersgd() -> None:
    """Against numpy's QR decomposition, with AdamW on the averaged gradient."""
    group = PowerSgdWorkers({n: torch.from_numpy(v) for n, v in initial().items()}, K, rank=2, saving_min=0.45)
    q = {n: v.numpy().copy() for n, v in group.q.items()}
    assert sorted(q) == ["blocks.1.w", "embed"]  # the others would not shrink enough
    whole_matrices = sum(int(np.prod(shape)) for n, shape in SHAPES.items() if n not in q)
    assert group.values_sent == whole_matrices + 2 * sum(sum(SHAPES[n]) for n in q)
    errors = [{n: np.zeros(SHAPES[n]) for n in q} for _ in range(K)]
    params, adam = initial(), AdamWReference()
    for step in range(1, 31):
        grads = [gradient(k, step, params) for k in range(K)]
        averaged = group.step([{n: torch.from_numpy(g) for n, g in grad.items()} for grad in grads])
        whole = {n: np.mean([g[n] for g in grads], axis=0) for n in SHAPES}
        for n in q:
            m = [e[n] + g[n] for e, g in zip(errors, grads, strict=True)]
            p, r = np.linalg.qr(np.mean([x @ q[n] for x in m], axis=0))
            p = p * np.sign(np.diag(r))  # Gram and Schmidt's signs
            q[n] = np.mean([x.T @ p for x in m], axis=0)
            whole[n] = p @ q[n].T
            for e, x in zip(errors, m, strict=True):
                e[n] = x - whole[n]
        adam.step(params, whole)
        assert apart([{n: v.numpy() for n, v in averaged.items()}], [whole]) < 1e-9
    assert apart([{n: group.errors[k][n].numpy() for n in q} for k in range(K)], errors) < 1e-9


def test_powersgd_with_full_rank_is_the_mean() -> None:
    group = PowerSgdWorkers({"w": torch.zeros(6, 3)}, 2, rank=3, saving_min=-1.0)
    for _ in range(3):
        grads = [torch.randn(6, 3) for _ in range(2)]
        averaged = group.step([{"w": g} for g in grads])["w"]
        assert averaged.dtype == torch.float32
        assert torch.allclose(averaged, (grads[0] + grads[1]) / 2, atol=1e-5)


def test_columns_are_orthonormal_as_torchs() -> None:
    hook = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    p = torch.randn(40, 4, dtype=torch.float64)
    theirs = p.clone()
    hook._orthogonalize_gram_schmidt(theirs.unsqueeze(0))
    assert torch.allclose(orthonormal(p), theirs, rtol=0, atol=1e-12)
