"""The curve of a loss in a line of text, and what the last rounds say of the rest of the run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.progress.curve import POINTS_MAX, LossCurve
from cli.progress.state import RoundPace
from peer.figures import duration_text


def curve_of(values: list[float | None]) -> LossCurve:
    curve = LossCurve()
    for value in values:
        curve.add(value)
    return curve


def test_a_falling_loss_is_a_falling_line() -> None:
    assert curve_of([8.0 - step for step in range(8)]).drawn(24) == "█▇▆▅▄▃▂▁"
    assert curve_of([float(-step) for step in range(100_000)]).drawn(8) == "█▇▆▅▄▃▂▁"


def test_no_curve_before_two_points_and_none_of_what_is_no_number() -> None:
    assert curve_of([]).drawn(24) == curve_of([1.0]).drawn(24) == curve_of([1.0, None, math.nan]).drawn(24) == ""
    assert curve_of([1.0, 2.0]).drawn(0) == ""
    assert curve_of([2.0, 2.0, math.inf]).drawn(24) == "▁▁"


@given(st.lists(st.none() | st.floats(), max_size=500), st.integers(0, 100))
def test_a_curve_fits_and_stays_small(values: list[float | None], width: int) -> None:
    curve = curve_of(values)
    assert len(curve.drawn(width)) <= min(width, POINTS_MAX + 1) and len(curve._points) < POINTS_MAX


def test_the_pace_is_that_of_the_last_rounds() -> None:
    pace = RoundPace()
    assert pace.round_s is None and pace.left_s(100, 0.0) is None and pace.elapsed_s(5.0) is None
    pace.note(5, 999.0, seen=False)  # as it was caught up with
    pace.note(6, 999.1, seen=False)
    pace.note(7, 1000.0, 700)
    assert pace.round_s is None and pace.elapsed_s(1002.0) == 2.0
    for number, at in ((8, 1010.0), (8, 1011.0), (9, 1022.0), (12, 5000.0), (13, 5011.0)):
        pace.note(number, at, number * 100)
    assert pace.round_s == 11.0, "neither a round told of twice nor a leap counts"
    assert pace.tokens_per_s == pytest.approx(300 / 33)
    assert pace.left_s(20, 5011.0) == 77.0 and pace.left_s(20, 5015.0) == 73.0
    assert pace.left_s(13, 5011.0) is None and pace.left_s(0, 5011.0) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (3.21, "3.2 s"), (42.4, "42 s"), (200, "3 min"), (5999, "1 h 40 min"), (7500, "2 h 5 min"),
        (86_400, "24 h"), (200_000, "2 d 8 h"), (2_000_000, "23 d"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
