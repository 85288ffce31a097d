"""diloco, streaming, eager and gossip, which exchange every H steps, against float64 re-derivations from the papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.algorithms.fragments import strided_fragments
from peer.errors import ConfigError
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
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}
FRAGMENTS = [["embed", "blocks.0.w"], ["blocks.0.b"], ["blocks.1.w", "blocks.1.b"]]


def mean(arrays: list[np.ndarray]) -> np.ndarray:
    return sum(arrays) / len(arrays)  # type: ignore[return-value]


def outer_step(theta: np.ndarray, m: np.ndarray, delta: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    m = 0.9 * m + (0.1 if kind == "dampened" else 1.0) * delta
    return theta - 0.7 * (m if kind == "heavy ball" else delta + 0.9 * m), m


def diloco_by_formula(H: int, kind: str = "nesterov") -> list[Arrays]:
    theta, inner = initial(), [AdamWReference() for _ in range(K)]
    velocity = {n: np.zeros_like(v) for n, v in theta.items()}

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H == 0:
            for n in theta:
                delta = mean([theta[n] - w[n] for w in workers])
                theta[n], velocity[n] = outer_step(theta[n], velocity[n], delta, kind)
                for w in workers:
                    w[n] = theta[n].copy()

    return replayed(advance)


@pytest.mark.parametrize("H", [1, 5, 7])
def test_diloco(H: int) -> None:
    _, ours = simulated("diloco", H=H, **OUTER)
    assert apart(ours, diloco_by_formula(H)) < CLOSE


@pytest.mark.parametrize("kind", ["heavy ball", "dampened"])
def test_wrong_kinds_of_momentum_differ(kind: str) -> None:
    _, ours = simulated("diloco", H=5, **OUTER)
    assert apart(ours, diloco_by_formula(5, kind)) > 1e-4


def test_a_first_synchronization_one_step_late_differs() -> None:
    """exogym's trap: H + 1 steps before the first exchange."""
    _, ours = simulated("diloco", H=6, **OUTER)
    assert apart(ours, diloco_by_formula(5)) > 1e-4


def test_all_replicas_are_bit_equal_after_every_round() -> None:
    _, workers = simulated("diloco", H=5, **OUTER)
    for other in workers[1:]:
        assert all(np.array_equal(workers[0][n], other[n]) for n in SHAPES)


def test_momentum_0_and_lr_1_average_the_weights() -> None:
    inner = [AdamWReference() for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % 4 == 0:
            for n in SHAPES:
                average = mean([w[n] for w in workers])
                for w in workers:
                    w[n] = average.copy()

    _, ours = simulated("diloco", H=4, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
    assert apart(ours, replayed(advance)) < CLOSE


def test_one_worker_with_lr_1_is_its_inner_optimizer() -> None:
    init = {n: torch.from_numpy(v) for n, v in initial().items()}
    group = Group("diloco", init, 1, H=5, outer_lr=1.0, outer_momentum=0.0)
    params, adam = initial(), AdamWReference()
    for step in range(1, STEPS + 1):
        grads = gradient(0, step, params)
        group.step([{n: torch.from_numpy(g) for n, g in grads.items()}])
        adam.step(params, grads)
    assert apart([{n: v.numpy() for n, v in group.params(0).items()}], [params]) < CLOSE


def streaming_by_formula(H: int, tau: int, alpha: float, against_mixed: bool = False) -> list[Arrays]:
    every = H // len(FRAGMENTS)
    theta, inner = initial(), [AdamWReference() for _ in range(K)]
    velocity = {n: np.zeros_like(v) for n, v in theta.items()}
    base = [initial() for _ in range(K)]  # what a delta is taken against
    flying: Arrays = {}

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        slot = -(-step // every)  # the slot this step belongs to, from 1
        fragment = FRAGMENTS[(slot - 1) % len(FRAGMENTS)]
        if step == slot * every - tau:
            for n in fragment:
                flying[n] = mean([b[n] - w[n] for b, w in zip(base, workers, strict=True)])
        if step == slot * every:
            for n in fragment:
                theta[n], velocity[n] = outer_step(theta[n], velocity[n], flying.pop(n), "nesterov")
                for b, w in zip(base, workers, strict=True):
                    w[n] = alpha * w[n] + (1 - alpha) * theta[n]
                    b[n] = w[n].copy() if against_mixed else theta[n]

    return replayed(advance)


@pytest.mark.parametrize(("H", "tau", "alpha"), [(6, 0, 0.0), (12, 1, 0.5), (15, 4, 0.25), (3, 0, 1.0)])
def test_streaming(H: int, tau: int, alpha: float) -> None:
    _, ours = simulated("streaming", H=H, fragments=FRAGMENTS, tau=tau, alpha=alpha, **OUTER)
    assert apart(ours, streaming_by_formula(H, tau, alpha)) < CLOSE


def test_a_delta_against_the_mixed_weights_differs() -> None:
    _, ours = simulated("streaming", H=12, fragments=FRAGMENTS, tau=1, alpha=0.5, **OUTER)
    assert apart(ours, streaming_by_formula(12, 1, 0.5, against_mixed=True)) > 1e-4


def test_streaming_with_one_fragment_is_diloco_to_the_bit() -> None:
    _, plain = simulated("diloco", H=5, **OUTER)
    _, streamed = simulated("streaming", H=5, fragments=[list(SHAPES)], tau=0, alpha=0.0, **OUTER)
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(plain, streamed, strict=True) for n in SHAPES)


@pytest.mark.parametrize(
    ("fragments", "H", "tau"),
    [
        ([["embed"]], 6, 0),
        ([list(SHAPES), ["embed"]], 6, 0),
        ([list(SHAPES), []], 6, 0),
        (FRAGMENTS, 7, 0),
        (FRAGMENTS, 6, 2),
    ],
)
def test_impossible_fragments_are_refused(fragments: list[list[str]], H: int, tau: int) -> None:
    with pytest.raises(ConfigError, match=r"fragment"):
        simulated("streaming", H=H, fragments=fragments, tau=tau)


def test_strided_fragments_hold_whole_blocks() -> None:
    names = ["embed", *(f"layers.{i}.{p}" for i in range(5) for p in "ab"), "norm"]
    assert strided_fragments(names, 2) == [
        ["embed", "layers.0.a", "layers.0.b", "layers.2.a", "layers.2.b", "layers.4.a", "layers.4.b"],
        ["layers.1.a", "layers.1.b", "layers.3.a", "layers.3.b", "norm"],
    ]
    with pytest.raises(ConfigError, match="5 or fewer"):
        strided_fragments(names, 6)


def eager_by_formula(H: int, first_round_whole: bool = False) -> list[Arrays]:
    thetas, inner = [initial() for _ in range(K)], [AdamWReference() for _ in range(K)]
    velocities = [{n: np.zeros_like(v) for n, v in initial().items()} for _ in range(K)]
    before: list[Arrays] = []

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H:
            return
        deltas = [{n: t[n] - w[n] for n in t} for t, w in zip(thetas, workers, strict=True)]
        for k in range(K):
            for n in SHAPES:
                others = sum(before[j][n] for j in range(K) if j != k) / K if before else 0.0
                own = deltas[k][n] / (1 if first_round_whole and not before else K)
                thetas[k][n], velocities[k][n] = outer_step(thetas[k][n], velocities[k][n], own + others, "nesterov")
                workers[k][n] = thetas[k][n].copy()
        before[:] = deltas

    return replayed(advance)


def test_eager() -> None:
    _, ours = simulated("eager", H=5, **OUTER)
    assert apart(ours, eager_by_formula(5)) < CLOSE
    assert apart(ours, eager_by_formula(5, first_round_whole=True)) > 1e-4


def test_gossip() -> None:
    H, alpha, beta, gamma = 5, 0.5, 0.7, 0.6
    group, ours = simulated("gossip", H=H, alpha=alpha, beta=beta, gamma=gamma, seed=3)
    pairs = [group.methods[0].partners(i, K) for i in range(STEPS // H)]
    assert len({str(p) for p in pairs}) > 1  # drawn anew
    phi, inner = [initial() for _ in range(K)], [AdamWReference() for _ in range(K)]
    moves = [{n: np.zeros_like(v) for n, v in initial().items()} for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % H:
            return
        for pair in pairs[step // H - 1]:
            for n in SHAPES:
                delta = mean([phi[i][n] - workers[i][n] for i in pair])
                middle = mean([phi[i][n] for i in pair])
                for i in pair:
                    moves[i][n] = alpha * moves[i][n] - beta * delta - gamma * (phi[i][n] - middle)
                for i in pair:
                    phi[i][n] = phi[i][n] + moves[i][n]
                    workers[i][n] = phi[i][n].copy()

    assert apart(ours, replayed(advance)) < CLOSE


def test_a_coded_group_stays_near_an_uncoded_one_and_counts_its_bytes() -> None:
    _, plain = simulated("diloco", H=5, **OUTER)
    group, coded = simulated("diloco", H=5, codec="int8", codec_down="int8", **OUTER)
    numel = sum(v.size for v in initial().values())
    assert group.bytes_up == (STEPS // 5) * (4 + numel)
    assert 0 < apart(coded, plain) < 0.05
    for other in coded[1:]:
        assert all(np.array_equal(coded[0][n], other[n]) for n in SHAPES)


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of diloco"):
        simulated("dilocoo", H=5)
    with pytest.raises(ConfigError, match="does not take these settings"):
        simulated("diloco", H=5, topk=3)
    with pytest.raises(ConfigError, match="does not take these settings"):
        simulated("diloco", H=5, inner={"rate": 1e-3})
    with pytest.raises(ConfigError, match=r"choose .majority. or"):
        simulated("lion", lr=1e-3, vote="most")
    with pytest.raises(ConfigError, match="inner optimizer"):
        simulated("diloco", H=5, inner={"optimizer": "sgd"})
