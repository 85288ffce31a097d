"""Spans of blocks."""

from __future__ import annotations

import pytest

from peer.ipc.span import Span, spans_of


def test_properties_of_a_span() -> None:
    first, last = spans_of([(0, 3), (3, 8)])
    assert (first, last) == (Span(0, 3, 8), Span(3, 8, 8))
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert (last.count, last.blocks, str(last)) == (5, range(3, 8), "[3, 8) of 8")
    assert spans_of([(0, 8)]) == (Span.whole(8),)


@pytest.mark.parametrize("numbers", [(0, 0, 4), (2, 1, 4), (-1, 2, 4), (3, 5, 4)])
def test_a_span_lies_inside_the_model_and_holds_a_block(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="choose at least one block inside the model"):
        Span(*numbers)


@pytest.mark.parametrize("cuts", [[], [(0, 2), (3, 4)], [(1, 4)], [(0, 2), (1, 4)]])
def test_stages_follow_each_other_without_gaps(cuts: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="without gaps"):
        spans_of(cuts)


def test_each_stage_holds_a_block() -> None:
    with pytest.raises(ValueError, match="choose at least one block"):
        spans_of([(0, 0), (0, 4)])
