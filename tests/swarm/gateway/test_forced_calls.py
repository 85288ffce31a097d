"""Calls that a `tool_choice` forces: grammars and reading. In test_response_format.py a model writes such calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator as Checker

from peer.errors import ConfigError
from peer.ipc.grammar_messages import Grammar
from peer.worker.grammar.answer import AnswerMatcher, compile_grammar
from peer.worker.grammar.vocabulary import read_vocabulary
from peer.worker.text_client import ModelText
from swarm.gateway.asks import read_chat
from swarm.gateway.errors import ApiError
from swarm.gateway.forced_calls import forced_calls, with_calls
from swarm.gateway.reading.call_formats import FORMATS
from swarm.gateway.reading.tool_calls import CallStream, FoundPart
from swarm.gateway.tools import Tools
from tests.swarm.gateway.served_model import NAME

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "properties": {"kind": {"$ref": "#/$defs/Kind"}},
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["oak", "ash"]}},
}
SCHEMAS = {"weather": PLACE, "plant": TREE}
TOOLS: list[Any] = [{"type": "function", "function": {"name": k, "parameters": v}} for k, v in SCHEMAS.items()]
ASK: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200}
BY_NAME: Any = {"type": "function", "function": {"name": "plant"}}


def tools(*forced: str, is_parallel: bool = True) -> Tools:
    return Tools(tuple(TOOLS), is_parallel, forced)


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3_json"])
def test_what_follows_the_grammar_is_read_as_the_call(form: str) -> None:
    forced = forced_calls(FORMATS[form], tools("weather", "plant"))
    arguments = "parameters" if form == "llama3_json" else "arguments"
    call = {"name": "plant", arguments: {"kind": "ash"}}
    written = [call] if form == "mistral" else call
    Checker(json.loads(forced.grammar.schema)).validate(written)
    for wrong in ({**call, "name": "other"}, {**call, arguments: {"kind": "fir"}}, {"name": "plant"}, {**call, "a": 1}):
        assert not Checker(json.loads(forced.grammar.schema)).is_valid([wrong] if form == "mistral" else wrong)
    stream = CallStream(FORMATS[form], SCHEMAS)
    parts = [*stream.push(forced.begin), *stream.push(json.dumps(written)), *stream.finish()]
    pieces = [one for part in parts for one in part.calls]
    assert [(one.name, json.loads(one.arguments), one.end) for one in pieces] == [
        ("plant", {"kind": "ash"}, "completed")
    ]
    assert not any(part.text for part in parts)


def test_arguments_are_objects_and_one_call_is_one() -> None:
    """The schema of `plant` does not say that it is of objects."""
    one = json.loads(forced_calls(FORMATS["mistral"], tools("plant", is_parallel=False)).grammar.schema)
    assert one["maxItems"] == 1 and one["$defs"]["plant"]["type"] == "object"
    assert Checker(one).is_valid([{"name": "plant", "arguments": {"kind": "oak"}}])
    assert not Checker(one).is_valid([{"name": "plant", "arguments": []}])
    assert not Checker(one).is_valid([{"name": "weather", "arguments": {"place": "a", "days": 1}}])


@pytest.mark.parametrize("form", ["pythonic", "qwen3_coder"])
def test_a_form_that_is_no_json_cannot_be_forced(form: str) -> None:
    with pytest.raises(ApiError, match=f"in the form {form}, which is no JSON .*: send tool_choice auto") as refused:
        forced_calls(FORMATS[form], tools("plant"))
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tool_choice")


SPECIAL_ID = 300


class Words(ModelText):
    """A tokenizer of bytes that has one special token."""

    def __init__(self, special: str) -> None:
        super().__init__()
        self.special, self._text = frozenset([SPECIAL_ID]), special

    async def encode(self, text: str, *, special: bool) -> list[int]:
        return [SPECIAL_ID] if text == self._text else await super().encode(text, special=special)


CALL = '{"name": "plant", "%s": {"kind": "ash"}}'
FORMAT = Grammar('{"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": false}')


@pytest.mark.parametrize(
    ("form", "special", "calls"),
    [
        ("hermes", "", ["<tool_call>\n", CALL % "arguments", "\n</tool_call>\n<tool_call>\n", CALL % "arguments"]),
        ("hermes", "<tool_call>", [SPECIAL_ID, "\n", CALL % "arguments", "\n</tool_call>"]),
        ("mistral", "[TOOL_CALLS]", [SPECIAL_ID, "[", CALL % "arguments", ",", CALL % "arguments", "]"]),
        ("mistral", "", ["[TOOL_CALLS][", CALL % "arguments", "]"]),
        ("llama3_json", "<|python_tag|>", [CALL % "parameters", ";", CALL % "parameters"]),
    ],
)
async def test_an_answer_has_the_format_or_calls(form: str, special: str, calls: list[str | int]) -> None:
    """By the compiled grammar: each token is allowed, and the calls are read from what was written."""
    both = await with_calls(FORMAT, FORMATS[form], tools(), Words(special), "response_format")
    vocabulary = read_vocabulary("", SPECIAL_ID + 1)
    for parts in (calls, ['{"a": "<tool_call>"}']):
        matcher = AnswerMatcher(compile_grammar(both, vocabulary), [], SPECIAL_ID + 1)
        stream, found = CallStream(FORMATS[form], SCHEMAS, is_exclusive=True), list[FoundPart]()
        for part in parts:
            matcher.take([part] if isinstance(part, int) else list(part.encode()))
            found += stream.push(special if isinstance(part, int) else part, not isinstance(part, int))
        found += stream.finish()
        names = [piece.name for one in found for piece in one.calls if piece.is_first]
        text = "".join(one.text for one in found).strip()
        whole = "".join(part for part in parts if isinstance(part, str))
        assert (names, text) == ((["plant"] * whole.count("name"), "") if parts is calls else ([], whole))
        matcher.mask()
    wrong = AnswerMatcher(compile_grammar(both, vocabulary), [], SPECIAL_ID + 1)
    with pytest.raises(ConfigError):
        wrong.take(list(b'{"b"'))


async def test_text_that_looks_like_a_call_stays_in_the_json() -> None:
    written = '{"a": "<tool_call>{\\"name\\": 1}", "b": "<tool_call>' + CALL % "arguments" + '"}'
    for size in (1, 7, len(written)):
        stream = CallStream(FORMATS["hermes"], SCHEMAS, is_exclusive=True)
        parts = [part for at in range(0, len(written), size) for part in stream.push(written[at : at + size])]
        parts += stream.finish()
        assert "".join(part.text for part in parts) == written and not any(part.calls for part in parts)


@pytest.mark.parametrize("form", ["pythonic", "qwen3_coder"])
async def test_calls_that_are_no_json_are_refused_beside_a_format(form: str) -> None:
    with pytest.raises(ApiError, match=f"in the form {form}, which is none: .* tool_choice none") as refused:
        await with_calls(FORMAT, FORMATS[form], tools(), ModelText(), "text.format")
    assert refused.value.param == "text.format"


def test_choices_name_what_they_force() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [BY_NAME]}}
    for choice, forced, given in (
        ("required", ("weather", "plant"), 2),
        (BY_NAME, ("plant",), 2),
        (allowed, ("plant",), 1),
        ("auto", (), 2),
    ):
        ask = read_chat(json.dumps({**ASK, "tools": TOOLS, "tool_choice": choice}).encode())
        assert ask.tools is not None and (ask.tools.forced, len(ask.tools.given)) == (forced, given)
