"""The guard notices memory that is left, wherever it was allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fuzz.support.guard import GROWTH_MAX, no_growth


@pytest.mark.parametrize(
    "allocate",
    [
        pytest.param(lambda size: bytearray(size), id="one buffer"),
        pytest.param(lambda size: [bytes(2000) for _ in range(size // 2000)], id="many buffers"),
        pytest.param(lambda size: [str(number) for number in range(size // 500)], id="small objects"),
        pytest.param(lambda size: torch.zeros(size // 4), id="a tensor"),
    ],
)
def test_memory_that_is_left_is_noticed(allocate: Callable[[int], object]) -> None:
    kept: list[object] = []
    with pytest.raises(AssertionError, match="MiB are left"), no_growth():
        kept.append(allocate(GROWTH_MAX + (1 << 20)))
    with no_growth():
        allocate(GROWTH_MAX + (1 << 20))
