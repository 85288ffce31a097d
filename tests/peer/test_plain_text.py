"""Text of others at a sink: harmless, short, and still readable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.plain_text import LISTED_MAX, SENTENCE_MAX, cut, json_line, plain


@pytest.mark.parametrize("text", ["", "Zoë's box", "机器 7", "ящик", "नमस्ते", "e\u0301", "a: b"])
def test_languages_stay_as_they_are(text: str) -> None:
    assert plain(text) == text


CONTROLS = "\x00\t\n\r\x1b\x7f\x80\x85\x9b\x9f"
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202e\u2066\u2069"
INVISIBLE = "\xa0\xad\u034f\u115f\u200b\u200d\u2028\u2029\u2800\u3164\ufeff\uffa0\ufff9\U000e0001\U000e0041"
UNASSIGNED = "\ud800\udfff\ue000\uffff\U0010ffff"


@pytest.mark.parametrize(
    "letter", CONTROLS + DIRECTIONS + INVISIBLE + UNASSIGNED, ids=lambda letter: f"{ord(letter):x}"
)
def test_a_letter_that_is_obeyed_or_invisible_is_replaced(letter: str) -> None:
    assert plain(f"a{letter}b") == "a?b"


def test_a_flood_of_marks_is_cut() -> None:
    assert plain("a" + "\u0301" * 100 + "b\u0489") == "a\u0301\u0301\u0301b\u0489"


def test_a_cut_keeps_both_ends() -> None:
    shown = cut("what happened " + "x" * 500_000 + ": the remedy", 60)
    assert len(shown) == 60 and shown.startswith("what happened xx") and shown.endswith("xx: the remedy")
    assert " ... " in shown and cut("a" * 60, 60) == "a" * 60


@given(st.text(), st.integers(20, 400))
def test_any_text_becomes_plain(text: str, most: int) -> None:
    shown = plain(text, most)
    assert shown.isprintable() and len(shown) <= most and plain(shown, most) == shown


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_becomes_a_line_of_strict_json(value: object) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    line = json_line({"value": value})
    assert line.isascii() and line.isprintable()
    json.loads(line, parse_constant=refuse)


def test_json_is_bounded_and_keeps_what_fits() -> None:
    told = json.loads(json_line({"a": "x" * 500_075, "b": ["y"] * 5000, "c": float("nan"), "d": "\x1b\u202eé"}))
    assert len(told["a"]) == SENTENCE_MAX and len(told["b"]) == LISTED_MAX
    assert told["c"] is None and told["d"] == "\x1b\u202eé", "escaped, not lost"
