"""Calls of functions in a model's text, in each form: the same whatever the pieces, and nothing else is lost."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ConfigError
from swarm.gateway.json_depth import DEPTH_MAX
from swarm.gateway.reading.call_formats import FORMATS, format_of, takes_tools
from swarm.gateway.reading.json_text import CALL_CHARS_MAX, SPACE_CHARS_MAX
from swarm.gateway.reading.python_values import read_python_calls
from swarm.gateway.reading.tool_calls import CALLS_MAX, CallStream
from tests.swarm.gateway.reading.answers import JSON, MANY, SCHEMAS, SEVERAL, TWO, cut, found, read
from tests.swarm.gateway.tool_models import TEMPLATES, written


@pytest.mark.parametrize("form", SEVERAL)
def test_calls_are_the_same_with_one_cut_in_each_place_and_letter_by_letter(form: str) -> None:
    for before in ("", "Let me see.\n\n") if form not in ("llama3_json", "pythonic") else ("", "\n "):
        text = before + written(form, MANY) + "\n"
        wanted = (before.rstrip(), [(name, arguments) for name, arguments in MANY])
        assert found(form, [text]) == found(form, list(text)) == wanted
        for place in range(len(text)):
            assert found(form, [text[:place], text[place:]]) == wanted


_FRAGMENTS = [
    *(mark for form in FORMATS.values() for mark in (*form.marks, *form.inner, *form.closes, form.opening)),
    *(written(form, calls) for form in FORMATS for calls in (TWO, TWO[1:], [("unknown", {})])),
    *'{}[]()";,\n <x\\',
    *(size * " " for size in (SPACE_CHARS_MAX - 1, SPACE_CHARS_MAX, SPACE_CHARS_MAX + 1)),
    "</function>",
    "<parameter=city>",
    "</parameter>",
    '{"name": "clock", "arguments": {"a": "',
    "clock{}",
    "clock()",
    '{"name": "clock", "arguments": {',
    '[{"name":"add","parameters":{"a": [',
    "add[ARGS]{",
    ', {"name": "clock"}',
    ', "id": "x"',
    "get_weather(city='",
]
_ANSWERS = st.lists(st.sampled_from(_FRAGMENTS), max_size=8).map("".join)


@given(st.sampled_from(SEVERAL), _ANSWERS, st.lists(st.integers(0, 4000), max_size=12), st.booleans())
def test_pieces_of_any_size_give_the_same_calls_and_text(
    form: str, text: str, places: list[int], is_parallel: bool
) -> None:
    whole = read(form, [text], is_parallel)
    assert whole == read(form, list(text), is_parallel) == read(form, cut(text, places), is_parallel)
    if not whole[1]:
        assert whole[0] == text  # nothing is lost, not even white space


@given(st.sampled_from(SEVERAL), _ANSWERS, _ANSWERS)
def test_text_around_calls_is_kept(form: str, before: str, behind: str) -> None:
    """Whatever else the model writes, each letter is told or lies in a call, or beside one."""
    text, calls = read(form, [before + "Aaa" + written(form, TWO) + "Zzz" + behind])
    assert "Aaa" in text or any("Aaa" in json.dumps(call) for call in calls)
    assert "Zzz" in text or any("Zzz" in json.dumps(call) for call in calls)


@pytest.mark.parametrize(
    ("form", "text", "content", "names"),
    [
        ("hermes", '<tool_call>[{"name":"clock"},{"name":"add","arguments":null}]</tool_call>', "", ["clock", "add"]),
        ("hermes", '<tool_call>{"name":"clock","arguments":"{}"}', "", ["clock"]),  # in a string; no end
        ("hermes", '<tool_call>{"name":"clock"}</tool_call> then', " then", ["clock"]),
        ("hermes", '{"name":"clock","arguments":{}}', '{"name":"clock","arguments":{}}', []),
        ("mistral", '[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]add[CALL_ID]a1[ARGS]{"terms":[]}', "", ["clock", "add"]),
        ("mistral", "[TOOL_CALLS]clock{}", "", ["clock"]),
        ("llama3_json", '<|python_tag|>{"name":"clock","parameters":{}}', "", ["clock"]),
        ("llama3_json", 'Now: <|python_tag|>{"name":"clock"};{"name":"add"}', "Now:", ["clock", "add"]),
        ("llama3_json", '{"type":"function","name":"clock","parameters":{}}\n{"name":"add"}', "", ["clock", "add"]),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("pythonic", "<|python_start|>[clock(), add(terms=[1,],),]<|python_end|>", "", ["clock", "add"]),
        ("pythonic", "[1] says so", "[1] says so", []),
        ("qwen3_coder", "<function=clock>\n</function>", "", ["clock"]),
        ("qwen3_coder", "<tool_call><function=clock></function></tool_call>!", "!", ["clock"]),
        ("qwen3_coder", "<function=clock>now</function>", "<function=clock>now</function>", []),
    ],
)
def test_variants_that_models_write(form: str, text: str, content: str, names: list[str]) -> None:
    shown, calls = found(form, list(text))
    assert (shown, [name for name, _ in calls]) == (content, names)


@pytest.mark.parametrize("form", SEVERAL)
def test_a_call_of_an_unknown_function_or_half_a_call_is_text(form: str) -> None:
    half = written(form, [("add", {"terms": [1, 2]})])
    half = half[: half.index("{", half.index("add"))] if form in JSON else half[:-16]
    for text in (written(form, [("unknown", {"a": 1})]), half):
        assert found(form, list(text)) == (text, [])


def test_special_tokens_begin_calls_and_are_no_text() -> None:
    def pieces(*texts: str) -> Any:
        return found("mistral", list(texts), hidden=("[TOOL_CALLS]", "[ARGS]", "<s>"))

    assert pieces("Hi", "<s>", "[TOOL_CALLS]", "clock", "[ARGS]", "{}", "<s>") == ("Hi", [("clock", {})])
    assert pieces("[TOOL_CALLS]", "cl", "<s>", "ock", "{", "}") == ("", [("clock", {})])
    assert pieces("[TOOL_CALLS]", "nothing") == ("[TOOL_CALLS]nothing", [])
    bare = found("llama3_json", ["<s>", '{"name":"clock"}'], hidden=("<s>",))
    assert bare == found("llama3_json", ['{"name":', '"clock"}']) == ("", [("clock", {})])


@pytest.mark.parametrize("form", SEVERAL)
def test_an_answer_ends_behind_one_call_if_no_more_are_wanted(form: str) -> None:
    stream = CallStream(FORMATS[form], SCHEMAS, is_parallel=False)
    calls = [call for letter in written(form, TWO) for one in stream.push(letter) for call in one.calls]
    assert {call.name for call in calls} == {"get_weather"} and calls[-1].end == "completed"
    assert stream.count == 1 and stream.is_done and stream.push("more") == stream.finish() == []


# -- bounds ----------------------------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    """Return lists in an object, so many levels in all."""
    value: Any = []
    for _ in range(levels - 2):
        value = [value]
    return {"terms": value}


@pytest.mark.parametrize("form", SEVERAL)
def test_arguments_have_a_depth(form: str) -> None:
    within, beyond = (written(form, [("add", nested(levels))]) for levels in (DEPTH_MAX, DEPTH_MAX + 1))
    assert found(form, [within]) == ("", [("add", nested(DEPTH_MAX))])
    text, calls = read(form, [beyond])
    if form not in JSON:
        assert (text, calls) == (beyond, [])
        return
    (call,) = calls  # it has begun: its arguments end before the list that is too deep
    assert call == ("add", '{"terms": ' + "[" * (DEPTH_MAX - 1), "incomplete")
    assert beyond.endswith(text) and text.startswith("[]]")


@pytest.mark.parametrize("form", SEVERAL)
def test_hostile_texts_are_text(form: str) -> None:
    marks = (*FORMATS[form].marks, FORMATS[form].bare, FORMATS[form].opening)
    for mark in filter(None, marks):
        for letter in ("{", "[", "(", '"', "<function=", "\\", " ", mark, "<parameter=", "</function>", '{"name":'):
            text = mark + letter * 20_000 + "."
            assert found(form, cut(text, list(range(0, len(text), 97)))) == (text, [])


@pytest.mark.parametrize("form", SEVERAL)
def test_white_space_is_not_held_back_without_end(form: str) -> None:
    for before in ("", FORMATS[form].marks[0], written(form, TWO)):
        stream = CallStream(FORMATS[form], SCHEMAS)
        stream.push(before)
        told = "".join(one.text for _ in range(9) for one in stream.push(" " * SPACE_CHARS_MAX))
        assert len(told) >= 8 * SPACE_CHARS_MAX


def test_a_call_has_a_size_and_an_answer_a_number_of_calls() -> None:
    huge = written("hermes", [("get_weather", {"city": "x" * CALL_CHARS_MAX})])
    text, ((_, arguments, end),) = read("hermes", cut(huge, list(range(0, len(huge), 9999))))
    assert (len(arguments), end) == (CALL_CHARS_MAX, "incomplete") and huge.endswith(arguments + text)
    huge = written("qwen3_coder", [("get_weather", {"city": "x" * CALL_CHARS_MAX})])
    assert found("qwen3_coder", cut(huge, list(range(0, len(huge), 9999)))) == (huge, [])
    one = '<tool_call>{"name":"clock"}</tool_call>'
    text, calls = found("hermes", [one * (CALLS_MAX + 2)])
    assert (text, len(calls)) == (one * 2, CALLS_MAX)


# -- Python's values ---------------------------------------------------------------------------------------------------

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 62), 1 << 62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.from_regex("[a-z_][a-z0-9_]{0,8}", fullmatch=True), _VALUES, max_size=4))
def test_python_values_are_read_as_python_reads_them(arguments: dict[str, Any]) -> None:
    assert read_python_calls(written("pythonic", [("f", arguments)])) == [("f", arguments)]


_SIGNS = [*"01289.e+-_'\"\\nxuUN{}[](),: a", "\\", "'", '"', "True", "None", "1.5", "\\x41", "\\u00e9", "'a'", "{'b': "]


@given(st.lists(st.sampled_from(_SIGNS), max_size=10).map("".join))
def test_a_value_that_is_read_is_that_of_pythons_own_parser(value: str) -> None:
    """Fewer are read: no prefixes, sums, complex numbers, bytes or two texts in a row."""
    try:
        (call,) = read_python_calls(f"[f(a={value})]")
    except ValueError:
        return
    expression = ast.parse(f"f(a={value})", mode="eval").body
    assert isinstance(expression, ast.Call)
    read = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in expression.keywords}
    assert json.dumps(call[1]) == json.dumps(read)  # tuples are lists


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[f(1)]", "name is missing"),
        ("[f(a=__import__('os'))]", "no literal"),
        ("[f(a=1, a=2)]", "comes twice"),
        ("[f(a={1: 2})]", "key is no text"),
        ("[f(a=1e999)]", "too large"),
        (f"[f(a={'9' * 40})]", "too large"),
        (r"[f(a='\ud800')]", "does not exist"),
        (r"[f(a='\x4')]", "no code"),
        ("[f(a=01)]", "is missing"),
        ("[f(a='b]", "no end"),
        ("[f()] g", "follows"),
        ("[f() g()]", "is missing"),
    ],
)
def test_other_python_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_python_calls(text)


# -- the choice of a form --------------------------------------------------------------------------------------------


def test_a_template_shows_its_form() -> None:
    for form, template in TEMPLATES.items():
        found_form = format_of(template)
        assert found_form is not None and found_form.name == form and takes_tools(template)
    assert format_of("{{ messages }}") is None and not takes_tools("{{ messages }}")
    assert format_of(TEMPLATES["hermes"], "pythonic") is FORMATS["pythonic"]
    with pytest.raises(ConfigError, match="--tool-parser xml is not known: give auto, hermes, "):
        format_of("", "xml")
