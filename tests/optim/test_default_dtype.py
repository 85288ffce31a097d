"""Whatever default dtype an application has set in torch, codecs and methods give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from optim import config
from optim.codecs import CODECS, get_codec
from optim.strategies.registry import build_strategy
from tests.optim.strategies.test_strategies import METHODS
from tests.optim.support.rounds import FP32, INNER, LAYOUT, Rounds, encoded, flat
from tests.optim.support.trajectory import initial


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def both(work: Callable[[], list[torch.Tensor]]) -> None:
    """Do the work with both defaults, and compare."""
    with default_dtype(torch.float32):
        usual = work()
    with default_dtype(torch.float64):
        other = work()
    assert len(usual) == len(other) > 0
    for a, b in zip(usual, other, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def vector(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [0, 5, 5000])
def test_codecs(name: str, numel: int) -> None:
    codec = get_codec(name)

    def work() -> list[torch.Tensor]:
        torch.manual_seed(0)
        data = codec.encode(vector(numel))
        return [data, codec.decode(data, numel)]

    both(work)


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    own = isinstance(METHODS[name], config.DemoConfig | config.SparseLocoConfig | config.LionConfig)
    both(lambda: rounds_of(METHODS[name], config.CodecConfig() if own else FP32))


@pytest.mark.parametrize(
    ("up", "merge"),
    [("int8", "mean"), ("int8", "trimmed_mean"), ("int8", "median"), ("int8", "flag"), ("powersgd", "mean")],
)
def test_codecs_and_merges_of_methods(up: Any, merge: Any) -> None:
    both(lambda: rounds_of(config.DilocoConfig(steps=5, merge=merge), config.CodecConfig(up=up, down="fp32", rank=1)))


def rounds_of(method: config.OuterConfig, codec: config.CodecConfig) -> list[torch.Tensor]:
    """Return what four rounds of four peers come to, and what they would send next."""
    torch.manual_seed(0)
    rounds = Rounds(lambda: build_strategy(method, codec, LAYOUT, INNER), flat(initial()), 4)
    for number in range(4):
        rounds.exchange([vector(LAYOUT.numel, 4 * number + peer) for peer in range(4)], lr=1e-2)
    coding = rounds.strategies[0].coding(rounds.round_info(1e-2), rounds.tensors)
    messages, _ = encoded(rounds.strategies[0], rounds.round_info(1e-2), coding, vector(LAYOUT.numel, 99))
    return [*rounds.tensors, *messages]
