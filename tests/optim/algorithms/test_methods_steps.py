"""lion, allreduce and powersgd, which exchange at every step, against float64 re-derivations from the papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.optim.reference.group import Group
from tests.optim.support.trajectory import (
    SHAPES,
    STEPS,
    AdamWReference,
    Arrays,
    K,
    apart,
    gradient,
    initial,
    replayed,
    simulated,
)

CLOSE = 1e-9
LION = {"lr": 3e-3, "b1": 0.9, "b2": 0.99, "wd": 0.1}


def mean(arrays: list[np.ndarray]) -> np.ndarray:
    return sum(arrays) / len(arrays)  # type: ignore[return-value]


def lion_by_formula(vote: str) -> list[Arrays]:
    lr, b1, b2, wd = LION["lr"], LION["b1"], LION["b2"], LION["wd"]
    moments = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for n in SHAPES:
            votes = sum(np.sign(b1 * m[n] + (1 - b1) * g[n]) for m, g in zip(moments, grads, strict=True))
            move = np.sign(votes) if vote == "majority" else votes / K
            for m, g, w in zip(moments, grads, workers, strict=True):
                m[n] = b2 * m[n] + (1 - b2) * g[n]
                w[n] = w[n] - lr * (move + wd * w[n])

    return replayed(advance)


@pytest.mark.parametrize("vote", ["majority", "average"])
def test_lion(vote: str) -> None:
    _, ours = simulated("lion", **LION, vote=vote)
    assert apart(ours, lion_by_formula(vote)) < CLOSE


@pytest.mark.parametrize("workers", [2, 3, 6, 7])
def test_a_tie_of_votes_moves_nothing(workers: int) -> None:
    group = Group("lion", {"w": torch.zeros(3, dtype=torch.float64)}, workers, lr=0.1)
    signs = [1.0 if k % 2 else -1.0 for k in range(workers)]
    group.step([{"w": torch.tensor([s, 1.0, 0.0], dtype=torch.float64)} for s in signs])
    expected = 0.0 if workers % 2 == 0 else 0.1
    assert group.params(0)["w"].tolist() == [expected, -0.1, 0.0]


def allreduce_by_formula(optimizer: str) -> list[Arrays]:
    """Two micro-steps of four workers: the mean of eight gradients, one step."""
    reference, batch = AdamWReference(), []

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        batch.extend(grads)
        if step % 2:
            return
        params = workers[0]
        whole = {n: mean([g[n] for g in batch]) for n in SHAPES}
        if optimizer == "adamw":
            reference.step(params, whole)
        else:
            for n, direction in reference.directions(whole).items():
                move = direction + 0.1 * params[n]
                params[n] = params[n] - 1e-2 * np.linalg.norm(params[n]) / np.linalg.norm(move) * move
        batch.clear()
        for w in workers[1:]:
            w.update({n: v.copy() for n, v in params.items()})

    return replayed(advance)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_allreduce_is_one_process_with_the_whole_batch(optimizer: str) -> None:
    _, ours = simulated("allreduce", accumulate=2, inner={"optimizer": optimizer})
    assert apart(ours, allreduce_by_formula(optimizer)) < CLOSE


def test_powersgd() -> None:
    rank = 2
    init = {n: torch.from_numpy(v) for n, v in initial().items()}
    group = Group("powersgd", init, K, rank=rank, saving_min=0.45)
    method = group.methods[0]
    q = {n: v.numpy().copy() for n, v in method.q.items()}  # type: ignore[attr-defined]
    assert sorted(q) == ["blocks.1.w", "embed"]  # the others would not shrink enough
    errors = [{n: np.zeros(SHAPES[n]) for n in q} for _ in range(K)]
    params, adam = initial(), AdamWReference()
    for step in range(1, STEPS + 1):
        grads = [gradient(k, step, params) for k in range(K)]
        group.step([{n: torch.from_numpy(g) for n, g in grad.items()} for grad in grads])
        whole = {n: mean([g[n] for g in grads]) for n in SHAPES}
        for n in q:
            m = [e[n] + g[n] for e, g in zip(errors, grads, strict=True)]
            p, r = np.linalg.qr(mean([x @ q[n] for x in m]))
            p = p * np.sign(np.diag(r))  # Gram and Schmidt's signs
            q[n] = mean([x.T @ p for x in m])
            whole[n] = p @ q[n].T
            for e, x in zip(errors, m, strict=True):
                e[n] = x - whole[n]
        adam.step(params, whole)
        assert apart([{n: v.numpy() for n, v in group.gradient.items()}], [whole]) < CLOSE
    assert apart([{n: group.errors(k)[n].numpy() for n in q} for k in range(K)], errors) < CLOSE
    assert apart([{n: v.numpy() for n, v in group.params(k).items()} for k in range(K)], [params] * K) < CLOSE


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("diloco", {"H": 2}),
        ("diloco", {"H": 2, "codec": "int4"}),
        ("demo", {"lr": 1e-2, "topk": 3, "chunk": 4}),
        ("sparseloco", {"H": 2, "topk": 4, "chunk": 4}),
        ("lion", {"lr": 1e-2, "vote": "average"}),
        ("allreduce", {}),
        ("powersgd", {"rank": 2}),
    ],
)
def test_the_order_of_workers_does_not_change_a_bit(algo: str, settings: dict[str, object]) -> None:
    init = {n: torch.from_numpy(v) for n, v in initial().items()}
    groups = [Group(algo, init, K, **settings) for _ in range(2)]  # type: ignore[arg-type]
    order = [2, 0, 3, 1]
    for step in range(1, 7):
        grads = [{n: torch.from_numpy(g) for n, g in gradient(k, step, initial()).items()} for k in range(K)]
        groups[0].step(grads)
        groups[1].step([grads[k] for k in order])
    assert all(torch.equal(p, groups[1].params(0)[n]) for n, p in groups[0].params(0).items())
    assert not torch.equal(groups[0].params(0)["embed"], init["embed"])
