"""The choice for each slice against trying everything."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import get_codec
from optim.codecs.allocate import STEPS, Choice, allocate
from peer.errors import ConfigError

CHOICES = st.builds(Choice, st.just("x"), st.integers(1, 1000), st.floats(0, 10))
TABLES = st.lists(st.lists(CHOICES, min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(TABLES, st.floats(0.1, 20))
def test_the_fewest_bytes_within_the_budget(tables: list[list[Choice]], budget: float) -> None:
    possible = [p for p in itertools.product(*tables) if sum(c.error for c in p) <= budget]
    rounded = budget * (1 - len(tables) / STEPS)  # errors are rounded up by at most a step each
    surely = [p for p in possible if sum(c.error for c in p) <= rounded]
    try:
        chosen = allocate(tables, budget)
    except ConfigError:
        assert not surely
        return
    assert sum(c.error for c in chosen) <= budget * (1 + 1e-12)
    size = sum(c.size_bytes for c in chosen)
    assert size >= min(sum(c.size_bytes for c in p) for p in possible)
    if surely:
        assert size <= min(sum(c.size_bytes for c in p) for p in surely)


def test_slices_of_different_weight_get_different_codecs() -> None:
    """A small loud slice and a large quiet one: the bits go where the error is."""
    slices = [torch.randn(4096) * 10, torch.randn(16 * 4096) * 0.01]
    tables = [[cost(name, values) for name in ("sign", "int4", "int8", "fp16")] for values in slices]
    uniform = [next(c for c in table if c.name == "int4") for table in tables]
    chosen = allocate(tables, sum(c.error for c in uniform))
    assert [c.name for c in chosen] == ["int8", "sign"]
    assert sum(c.size_bytes for c in chosen) < 0.5 * sum(c.size_bytes for c in uniform)


def cost(name: str, values: torch.Tensor) -> Choice:
    codec = get_codec(name)
    data = codec.encode(values)
    error = (codec.decode(data, len(values)) - values).double().square().sum()
    return Choice(name, data.numel(), float(error))


def test_an_impossible_budget_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="raise it"):
        allocate([[Choice("a", 1, 2.0)]], 1.0)
    assert allocate([[Choice("a", 1, 2.0), Choice("b", 9, 0.0)]], 0.0)[0].name == "b"
