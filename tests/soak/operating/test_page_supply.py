"""Training on pages that are fetched as they are needed: workers do not wait for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.training.pages import measure

pytestmark = [pytest.mark.process, pytest.mark.soak]


async def test_workers_wait_less_than_a_hundredth_of_the_time_for_pages() -> None:
    options = SimpleNamespace(peers=3, rounds=12, steps=40, cache=0.1)  # a cache of 24 pages, and 30 are trained on
    row = await measure(0.5, cast(Any, options))
    assert row["missing"] == 0 and row["idle"] < 0.01, row
