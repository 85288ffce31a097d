"""K workers that train through coded messages: near uncoded ones, as many bytes as documented, equal work alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.training.strategy_group import StrategyGroup
from optim import config
from optim.codecs import get_codec
from peer.compute.optimizer import InnerSpec
from tests.optim.support.rounds import LAYOUT, LR, built, trained, weights
from tests.optim.support.trajectory import STEPS, K, apart

METHOD = config.DilocoConfig(steps=5)


@pytest.mark.parametrize(("up", "down", "near"), [("int8", "int8", 0.05), ("bf16", "int8", 0.05), ("topk", "nf4", 2.0)])
def test_a_coded_group_stays_near_an_uncoded_one_and_counts_its_bytes(up: Any, down: Any, near: float) -> None:
    plain = trained(built(METHOD), 5)
    coded = trained(built(METHOD, config.CodecConfig(up=up, down=down)), 5)
    rounds = STEPS // 5
    assert plain.bytes_up == plain.bytes_down == rounds * 4 * LAYOUT.numel
    assert coded.bytes_up == rounds * get_codec(up).encoded_size(LAYOUT.numel)
    assert coded.bytes_down == rounds * get_codec(down).encoded_size(LAYOUT.numel)
    ours = weights(coded)
    assert 0 < apart(ours, weights(plain)) < near
    for other in ours[1:]:
        assert all(np.array_equal(ours[0][n], other[n]) for n in other)


def test_the_gate_weighs_equal_work_alike() -> None:
    """Updates of nearly one length; the gate shortens longer ones."""
    init, build = LAYOUT.views(torch.zeros(LAYOUT.numel)), built(METHOD, config.CodecConfig())
    plain, gated = (StrategyGroup(build, init, K, 5, InnerSpec(lr=LR), tokens=tokens) for tokens in (None, 64))
    for _ in range(10):
        grads = [LAYOUT.views(torch.randn(LAYOUT.numel)) for _ in range(K)]
        for group in (plain, gated):
            group.step(grads)
    assert plain.theta.any()
    assert torch.equal(plain.theta, gated.theta)
