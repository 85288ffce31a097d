"""The choice for each part against trying everything, in float64."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import allocate as module
from optim.codecs.allocate import Choice, allocate

CHOICES = st.builds(Choice, st.integers(1, 300), st.floats(0, 10))
TABLES = st.lists(st.lists(CHOICES, min_size=1, max_size=4), min_size=1, max_size=5)


def costs(tables: list[list[Choice]], numbers: tuple[int, ...] | list[int]) -> tuple[int, float]:
    """The bytes and the error of a choice."""
    picked = [table[number] for table, number in zip(tables, numbers, strict=True)]
    return sum(choice.size_bytes for choice in picked), sum(choice.error for choice in picked)


def best(tables: list[list[Choice]], budget: float) -> float:
    """The least error of all choices within the budget."""
    every = (costs(tables, numbers) for numbers in itertools.product(*(range(len(table)) for table in tables)))
    return min((error for size, error in every if size <= budget), default=float("inf"))


@settings(max_examples=150, deadline=None)
@given(TABLES, st.integers(1, 1500))
def test_the_least_error_within_the_bytes(tables: list[list[Choice]], budget: int) -> None:
    if budget < sum(min(choice.size_bytes for choice in table) for table in tables):
        with pytest.raises(ValueError, match="allow that many"):
            allocate(tables, budget)
        return
    size, error = costs(tables, allocate(tables, budget))
    assert size <= budget
    assert error == pytest.approx(best(tables, budget), rel=1e-12)


def test_sizes_in_steps_keep_the_budget_and_miss_a_step_a_part_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 50)

    @settings(max_examples=100, deadline=None)
    @given(TABLES, st.integers(1, 1500))
    def check(tables: list[list[Choice]], budget: int) -> None:
        spare = budget - sum(min(choice.size_bytes for choice in table) for table in tables)
        if spare < 0:
            return
        size, error = costs(tables, allocate(tables, budget))
        assert size <= budget
        assert error <= best(tables, budget - (len(tables) + 1) * -(-spare // 50)) * (1 + 1e-12)

    check()


def test_of_equal_errors_the_smaller_is_taken() -> None:
    assert allocate([[Choice(9, 0.0), Choice(2, 0.0), Choice(5, 0.0)]], 100) == [1]
