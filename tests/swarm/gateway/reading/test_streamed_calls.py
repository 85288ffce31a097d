"""Calls as JSON while the model writes them: arguments come with their letters, and what has begun stays a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.reading.call_formats import FORMATS
from swarm.gateway.reading.json_text import SPACE_CHARS_MAX, ObjectText
from swarm.gateway.reading.tool_calls import CALLS_MAX, CallStream
from tests.swarm.gateway.reading.answers import JSON, SCHEMAS, cut, found, read
from tests.swarm.gateway.tool_models import written

HEADS = {
    "hermes": ('<tool_call>\n{"name": "add", "arguments": ', "}"),
    "hermes, a list": ('<tool_call>[ {"name":"add","arguments":', "}]"),
    "llama3_json": ('{"type": "function", "name": "add", "parameters": ', "}"),
    "llama3_json, marked": ('<|python_tag|>{"name": "add", "id": "a[1", "n": -1.5, "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS] [{"name": "add", "arguments": ', "}]"),
    "mistral, named": ("[TOOL_CALLS]add[CALL_ID]a1b2[ARGS]", ""),
    "mistral, an object": ('[TOOL_CALLS]{"id" : "123456789" , "name" : "add" , "arguments" : ', "}"),
}
"""A call of each spelling, up to its arguments, and what closes it."""
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
_OBJECTS = st.builds(
    json.dumps,
    st.dictionaries(st.text(), _VALUES, max_size=4),
    indent=st.none() | st.just(1),
    ensure_ascii=st.booleans(),
)


@given(st.sampled_from(sorted(HEADS)), _OBJECTS, st.lists(st.integers(0, 400), max_size=20), st.booleans())
def test_each_letter_of_arguments_comes_with_the_piece_that_brings_it(
    spelling: str, arguments: str, places: list[int], by_letters: bool
) -> None:
    """Nothing of valid JSON is held back, whatever the pieces; and a call is told as soon as it is certain."""
    head, _ = HEADS[spelling]
    text = head + arguments
    stream = CallStream(FORMATS[spelling.split(",")[0]], SCHEMAS)
    size, told = 0, ""
    for piece in text if by_letters else cut(text, places):
        size += len(piece)
        calls = [call for one in stream.push(piece) for call in one.calls]
        assert [call.is_first for call in calls if call.is_first] == [True] * (size > len(head) and not told)
        told += "".join(call.arguments for call in calls)
        assert told == text[len(head) : size]
        assert all((call.end == "completed") == (size == len(text)) for call in calls)
    assert stream.finish() == []


@given(_OBJECTS, st.text(st.sampled_from('{}[]",\\:<a ')))
def test_an_object_ends_where_a_parser_of_json_ends_it(arguments: str, behind: str) -> None:
    _, end = json.JSONDecoder().raw_decode(arguments + behind)
    assert ObjectText(("</tool_call>",)).take(arguments + behind, is_last=False) == (end, "completed")


@pytest.mark.parametrize("spelling", sorted(HEADS))
def test_a_call_that_is_cut_has_the_arguments_so_far(spelling: str) -> None:
    (head, closes), form = HEADS[spelling], spelling.split(",")[0]
    arguments = '{"terms": [1, {"a": "\\"}] </tool_call> [TOOL_CALLS] \\\\"}], "\\u00e9": 1e5 }'
    assert read(form, [head]) == (head, [])
    for place in range(1, len(arguments)):
        assert read(form, [head + arguments[:place]]) == ("", [("add", arguments[:place], "incomplete")])
    for behind in (closes[:size] + space for size in range(len(closes) + 1) for space in ("", " \n")):
        assert read(form, [head + arguments + behind]) == ("", [("add", arguments, "completed")])


_NAME = '<tool_call>{"name":"add","arguments":'
_LIST = '[TOOL_CALLS][{"name":"add","arguments":'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        # wrong JSON is told as it is, and ends with its brace
        ("hermes", _NAME + "{a: 01, 'b'}}</tool_call>.", ".", [("add", "{a: 01, 'b'}", "completed")]),
        ("hermes", _NAME + '{"a": [1}}</tool_call>.', ".", [("add", '{"a": [1}', "completed")]),
        ("hermes", _NAME + '{"a": [{"b": 1]}}</tool_call>.', ".", [("add", '{"a": [{"b": 1]}', "completed")]),
        ("hermes", _NAME + '{"a": 1]}}</tool_call>.', ".", [("add", '{"a": 1]}', "completed")]),
        ("mistral", "[TOOL_CALLS]add{)}.", ".", [("add", "{)}", "completed")]),
        # without one it ends at a mark outside of strings, or with the answer
        ("hermes", _NAME + '{"a": 1\n</tool_call>.', ".", [("add", '{"a": 1\n', "incomplete")]),
        ("hermes", _NAME + '{"a": <1</tool_cal', "", [("add", '{"a": <1</tool_cal', "incomplete")]),
        ("hermes", _NAME + '{"a": "</tool_call>"}}', "", [("add", '{"a": "</tool_call>"}', "completed")]),
        ("hermes", _NAME + '{"a": "</tool_call>.', "", [("add", '{"a": "</tool_call>.', "incomplete")]),
        (
            "hermes",
            _NAME + "{" + _NAME + "{}}</tool_call>",
            "",
            [("add", "{", "incomplete"), ("add", "{}", "completed")],
        ),
        (
            "llama3_json",
            '{"name":"add","parameters":{"a"<|python_tag|>{"name":"clock"}',
            "",
            [("add", '{"a"', "incomplete"), ("clock", "{}", "completed")],
        ),
        ("mistral", "[TOOL_CALLS]add{[TOOL_CALLS]", "", [("add", "{[TOOL_CALLS]", "incomplete")]),
        # brackets around the arguments that are missing, wrong, or too many
        ("hermes", _NAME + '{"a": 1}</tool_call>.', ".", [("add", '{"a": 1}', "completed")]),
        ("hermes", _NAME + '{"a": 1}}}</tool_call>.', "}</tool_call>.", [("add", '{"a": 1}', "completed")]),
        ("hermes", _NAME + '{}, "id": "x"]</tool_call>', ', "id": "x"]</tool_call>', [("add", "{}", "completed")]),
        ("hermes", _NAME + '{}, "id": {"x": ["}"]}}</tool_call>.', ".", [("add", "{}", "completed")]),
        ("mistral", _LIST + "{}]", "", [("add", "{}", "completed")]),
        (
            "mistral",
            _LIST + '{},{"name":"clock","arguments":{}}]',
            "",
            [("add", "{}", "completed"), ("clock", "{}", "completed")],
        ),
        # the calls of a list are each for itself from the first one on that has begun
        (
            "mistral",
            _LIST + '{}}, {"name":"clock"} ,{"arguments":{"n":1},"name":"add"}]',
            "",
            [("add", "{}", "completed"), ("clock", "{}", "completed"), ("add", '{"n":1}', "completed")],
        ),
        ("mistral", _LIST + '{}}, {"name":"f"}]', '{"name":"f"}]', [("add", "{}", "completed")]),
        ("mistral", _LIST + "{}}, 1]", ", 1]", [("add", "{}", "completed")]),
        ("mistral", '[TOOL_CALLS][{"name":"clock"},{"name":"add","arguments":{', None, []),
        # what does not begin in this order is a call once it is whole
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"add"}', "", [("add", '{"a":1}', "completed")]),
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"add"', None, []),
        ("hermes", _NAME + '"{\\"a\\": 1}"}', "", [("add", '{"a": 1}', "completed")]),
        ("hermes", _NAME + '"{\\"a\\": 1}"', None, []),
        ("hermes", _NAME.replace("add", "f") + "{}}", None, []),
        ("hermes", _NAME.replace("add", "a\\u0064d") + '{"a":1}', None, []),
        ("mistral", '[TOOL_CALLS]f{"a":1}', None, []),
        ("hermes", '{"name":"add","arguments":{', None, []),
    ],
)
def test_what_has_begun_is_a_call_however_it_goes_on(form: str, text: str, content: str | None, calls: Any) -> None:
    """`content`: None for all of it."""
    wanted = (text if content is None else content, calls)
    assert read(form, [text]) == read(form, list(text)) == wanted
    for place in range(len(text)):
        assert read(form, [text[:place], text[place:]]) == wanted


@pytest.mark.parametrize("form", JSON)
def test_a_call_alone_ends_with_its_arguments(form: str) -> None:
    text = written(form, [("add", {"terms": []}), ("clock", {})])
    stream = CallStream(FORMATS[form], SCHEMAS, is_parallel=False)
    ends = [size for size, letter in enumerate(text, 1) if stream.push(letter) and stream.is_done]
    assert ends == [text.index("{", text.index("add")) + len('{"terms": []}')]


def test_what_stands_around_arguments_has_bounds() -> None:
    space = " " * (SPACE_CHARS_MAX + 1)
    assert read("hermes", [_NAME + "{}" + space + "}"]) == (space + "}", [("add", "{}", "completed")])
    assert read("mistral", [_LIST + "{}}" + space + "]"])[0] == space + "]"
    assert read("mistral", [_LIST + "{}}" + "," + space + '{"name":"clock"}]'])[0].startswith("," + space)
    members = ', "id": "' + "x" * 2000 + '"}'
    assert read("hermes", [_NAME + "{}" + members]) == (members, [("add", "{}", "completed")])
    one = '{"name":"clock","arguments":{}}'
    text, calls = found("mistral", ["[TOOL_CALLS][" + ",".join([one] * (CALLS_MAX + 1)) + "]"])
    assert (text, len(calls)) == ("," + one + "]", CALLS_MAX)


def test_a_long_way_to_the_arguments_is_waited_for() -> None:
    """Of members before them only a few short ones are taken; others have to be whole."""
    for other in ('"id": "' + "x" * 99 + '", ', '"id": {}, ', '"id": "a\\"b", ', '"a": 1, ' * 5):
        text = "<tool_call>{" + other + '"name": "add", "arguments": {"terms": []}}'
        assert found("hermes", [text]) == ("", [("add", {"terms": []})])
        assert read("hermes", [text[:-1]]) == (text[:-1], [])
