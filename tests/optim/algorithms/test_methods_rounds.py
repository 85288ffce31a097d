"""diloco, streaming, eager and gossip, which exchange every H steps, against the papers' formulas in float64.

The code that runs is driven: strategies in fp32 whose messages are bytes, in several slices.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.training.gossip_group import GossipGroup
from benchmarks.training.strategy_group import Overlap
from optim.algorithms.fragments import strided_fragments
from optim.algorithms.outer_step import DilocoOuter
from optim.config import DilocoConfig, EagerConfig, GossipConfig, StreamingConfig
from peer.compute.optimizer import InnerSpec
from peer.errors import ConfigError
from tests.optim.reference.diloco import LR, MOMENTUM, diloco
from tests.optim.reference.eager import eager
from tests.optim.reference.gossip import gossip
from tests.optim.reference.streaming import FRAGMENTS, streaming
from tests.optim.support.rounds import FP32, LAYOUT, built, flat, train, trained, weights
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
)

pytestmark = pytest.mark.usefixtures("short_slices")

CLOSE = 1e-6  # fp32, sixty steps


def trained_diloco(H: int) -> list[Arrays]:
    return weights(trained(built(DilocoConfig(steps=H, lr=LR, momentum=MOMENTUM)), H))


@pytest.mark.parametrize("H", [1, 5, 7])
def test_diloco(H: int) -> None:
    assert apart(trained_diloco(H), diloco(H)) < CLOSE


@pytest.mark.parametrize("kind", ["heavy ball", "dampened"])
def test_wrong_kinds_of_momentum_differ(kind: str) -> None:
    assert apart(trained_diloco(5), diloco(5, kind)) > 1e-4


def test_heavy_ball_momentum_is_a_setting() -> None:
    ours = trained(built(DilocoConfig(steps=5, nesterov=False, lr=LR, momentum=MOMENTUM)), 5)
    assert apart(weights(ours), diloco(5, "heavy ball")) < CLOSE


def test_a_first_synchronization_one_step_late_differs() -> None:
    """exogym's trap: H + 1 steps before the first exchange."""
    assert apart(trained_diloco(6), diloco(5)) > 1e-4


def test_momentum_0_and_lr_1_average_the_weights() -> None:
    inner = [AdamWReference() for _ in range(K)]

    def advance(step: int, workers: list[Arrays], grads: list[Arrays]) -> None:
        for optimizer, params, grad in zip(inner, workers, grads, strict=True):
            optimizer.step(params, grad)
        if step % 4 == 0:
            for n in SHAPES:
                average = np.mean([w[n] for w in workers], axis=0)
                for w in workers:
                    w[n] = average.copy()

    ours = trained(built(DilocoConfig(steps=4, lr=1.0, momentum=0.0, nesterov=False)), 4)
    assert apart(weights(ours), replayed(advance)) < CLOSE


def test_one_worker_with_lr_1_is_its_inner_optimizer() -> None:
    ours = trained(built(DilocoConfig(steps=5, lr=1.0, momentum=0.0)), 5, workers=1)
    params, adam = initial(), AdamWReference()
    for step in range(1, STEPS + 1):
        adam.step(params, gradient(0, step, params))
    assert apart(weights(ours), [params]) < CLOSE


def trained_streaming(H: int, tau: int, mix: float) -> list[Arrays]:
    method = StreamingConfig(steps=H, fragments=len(FRAGMENTS), tau=tau, mix=mix, lr=LR, momentum=MOMENTUM)
    return weights(trained(built(method), H // len(FRAGMENTS), Overlap(tau, mix)))


@pytest.mark.parametrize(("H", "tau", "mix"), [(6, 0, 0.0), (12, 1, 0.5), (10, 4, 0.25), (2, 0, 1.0)])
def test_streaming(H: int, tau: int, mix: float) -> None:
    assert apart(trained_streaming(H, tau, mix), streaming(H, tau, mix)) < CLOSE


def test_a_delta_against_the_mixed_weights_differs() -> None:
    assert apart(trained_streaming(12, 1, 0.5), streaming(12, 1, 0.5, against_mixed=True)) > 1e-4


def test_streaming_with_one_fragment_is_diloco_to_the_bit() -> None:
    method = StreamingConfig(steps=5, fragments=1, tau=0, mix=0.0, lr=LR, momentum=MOMENTUM)
    streamed, plain = weights(trained(built(method), 5)), trained_diloco(5)
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(plain, streamed, strict=True) for n in SHAPES)


def test_strided_fragments_hold_whole_blocks() -> None:
    names = ["embed", *(f"layers.{i}.{p}" for i in range(5) for p in "ab"), "norm"]
    assert strided_fragments(names, 2) == [
        ["embed", "layers.0.a", "layers.0.b", "layers.2.a", "layers.2.b", "layers.4.a", "layers.4.b"],
        ["layers.1.a", "layers.1.b", "layers.3.a", "layers.3.b", "norm"],
    ]
    with pytest.raises(ConfigError, match="5 or fewer"):
        strided_fragments(names, 6)


def test_eager() -> None:
    ours = weights(
        trained(built(EagerConfig(steps=5, lr=LR, momentum=MOMENTUM)), 5, Overlap(eager=DilocoOuter(LR, MOMENTUM)))
    )
    assert apart(ours, eager(5)) < CLOSE
    assert apart(ours, eager(5, first_round_whole=True)) > 1e-4


def test_gossip() -> None:
    method, draw, pairs = GossipConfig(steps=5), random.Random(3), []
    for _ in range(STEPS // 5):
        order = list(range(K))
        draw.shuffle(order)
        pairs.append([order[:2], order[2:]])
    group = GossipGroup(method, FP32, LAYOUT, flat(initial()), K, InnerSpec(), seed=3)
    train(group)
    constants = (method.alpha, method.beta, method.gamma)
    assert apart(weights(group), gossip(5, pairs, constants)) < CLOSE
    assert apart(weights(group), gossip(5, pairs, constants, pull=-1.0)) > 1e-4
    assert apart(weights(group), gossip(5, pairs[1:] + pairs[:1], constants)) > 1e-4
