"""A method's memory between updates, when one of them was not merged."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from blake3 import blake3

from optim import config
from optim.codecs import blockwise, topk
from optim.codecs.rows import absmax
from optim.strategies import dense, low_rank, sparse
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from swarm.rounds.trainers.contribution import Contributor
from tests.optim.support.layouts import layout_of

LAYOUT = layout_of({"embed": torch.zeros(128, 64), "gain": torch.zeros(64), "w": torch.zeros(64, 96)})
ROUND_INFO = RoundInfo(round=1, step=0, lr=1.0)
METHODS: dict[str, tuple[config.OuterConfig, config.CodecConfig]] = {
    "diloco, topk": (config.DilocoConfig(steps=4), config.CodecConfig(up="topk")),
    "diloco, powersgd": (config.DilocoConfig(steps=4), config.CodecConfig(up="powersgd")),
    "diloco, int8": (config.DilocoConfig(steps=4), config.CodecConfig()),
    "sparseloco": (config.SparseLocoConfig(steps=4), config.CodecConfig()),
}


def contributor_of(name: str) -> tuple[Contributor, Any]:
    strategy = build_strategy(*METHODS[name], LAYOUT, InnerConfig(lr=1e-3, batch_size=8, total_steps=8))
    context = SimpleNamespace(state=SimpleNamespace(strategy=strategy), schedule=SimpleNamespace(pipeline=True))
    return Contributor(cast(Any, context)), strategy


@pytest.mark.parametrize("name", METHODS)
def test_a_pipeline_forgets_an_update_that_was_not_merged(name: str) -> None:
    """The next product contains all of the last one."""
    torch.manual_seed(0)
    (ours, strategy), (theirs, other) = contributor_of(name), contributor_of(name)
    coding = strategy.coding(ROUND_INFO, [torch.zeros(LAYOUT.numel)] * 2)
    before, first, second, third = (torch.randn(LAYOUT.numel) for _ in range(4))
    for contributor in (ours, theirs):
        contributor._encode(ROUND_INFO, coding, before)
    owed = [vector.clone() for vector in strategy.memory(coding)]
    assert len(owed) == ("int8" not in name)
    for product in (first, first + second):
        ours.restore_residual(ours._encode(ROUND_INFO, coding, product))
    whole = first + second + third
    update, reference = ours._encode(ROUND_INFO, coding, whole), theirs._encode(ROUND_INFO, coding, whole)
    assert update.hashes == reference.hashes
    assert all(map(torch.equal, strategy.memory(coding), other.memory(coding)))


@pytest.mark.parametrize("name", METHODS)
def test_a_product_that_changes_while_it_is_encoded_is_not_sent_with_nan(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A worker can write its product at any time. What is hashed, measured and sent is one private copy."""
    contributor, strategy = contributor_of(name)
    coding = strategy.coding(ROUND_INFO, [torch.zeros(LAYOUT.numel)] * 2)
    product = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))

    def checked(values: torch.Tensor) -> torch.Tensor:
        largest = absmax(values)
        product.fill_(torch.nan)
        return largest

    for module in (blockwise, topk, dense, low_rank, sparse):
        monkeypatch.setattr(module, "absmax", checked)
    try:
        update = contributor._encode(ROUND_INFO, coding, product)
    except ProtocolViolation:
        return  # the contribution is empty
    product.fill_(torch.inf)
    assert tuple(blake3(piece).digest() for piece in update.slices) == update.hashes
    assert all(math.isfinite(coding.message_sqnorm(i, piece)) for i, piece in enumerate(update.slices))
