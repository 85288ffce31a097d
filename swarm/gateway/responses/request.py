"""The body of a response: its items as the messages of a chat, and its parameters as those of a chat.

A thought, a text and the calls behind it are one message of the assistant, as chat templates have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec

from peer.ipc.sampling_options import LIKELIEST_MAX
from peer.plain_text import plain
from swarm.gateway.asks import (
    MESSAGES_MAX,
    ROLES,
    GenerationAsk,
    GenerationBody,
    ask_of,
    read_object,
    read_parameters,
    read_text,
)
from swarm.gateway.errors import ApiError
from swarm.gateway.ignored import EMPTY, REFUSED
from swarm.gateway.response_format import FLAT
from swarm.gateway.template import CALLS_MAX, ChatMessage
from swarm.gateway.template_variables import Effort, read_variables
from swarm.gateway.tools import read_call_id, read_function_call, read_tools

_TEXTS: Final = ("input_text", "output_text", "text")
_SHOWN: Final = 40
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    **REFUSED,
    "background": (False,),
    "prompt": EMPTY,
    "truncation": ("disabled",),
}
_LOGPROBS: Final = "message.output_text.logprobs"
"""In `include`, asks for log-probabilities."""
_REPEATED: Final = ("instructions", "max_output_tokens", "temperature", "top_p", "parallel_tool_calls", "top_logprobs")


_FIELDS: Final = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Of an item of each type, beside its id, type and status."""


class _Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None


class _ResponseBody(GenerationBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: str | Annotated[list[Any], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str = ""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] | None = None
    store: bool = False
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LIKELIEST_MAX)] = 0
    reasoning: _Reasoning = _Reasoning()
    chat_template_kwargs: dict[str, Any] | None = None


def read_response(body: bytes) -> GenerationAsk:
    """Read the body of a response. Raises ApiError."""
    content = read_object(body)
    _check(content)
    has_logprobs = _takes_logprobs(content)
    ignored = _without_inner(content)
    given, format_field = _with_format(content)
    read, more = read_parameters(given, _ResponseBody, _REFUSED)
    if read.top_logprobs and not has_logprobs:
        raise _wrong("top_logprobs", f"top_logprobs needs log-probabilities: send include=[{_LOGPROBS!r}], too")
    logprobs = read.top_logprobs if has_logprobs else None
    tools, beside = read_tools(read.tools, read.tool_choice, read.parallel_tool_calls, is_flat=True)
    messages = _Messages()
    messages.add_items([{"role": "user", "content": read.input}] if isinstance(read.input, str) else read.input)
    repeated = {name: getattr(read, name) for name in _REPEATED}
    repeated["text"] = content.get("text") or {"format": {"type": "text"}}
    repeated |= {"instructions": read.instructions or None, "tool_choice": read.tool_choice, "tools": read.tools}
    if read.reasoning.effort is not None:
        repeated["reasoning"] = {"effort": read.reasoning.effort, "summary": None}
    return replace(
        ask_of(read, read.max_output_tokens, logprobs, format_field),
        tools=tools,
        messages=tuple(_instructed(messages.written, read.instructions)),
        ignored=(*more, *ignored, *beside, *messages.ignored, *(("store",) if read.store else ())),
        variables=read_variables(read.reasoning.effort, read.chat_template_kwargs, "reasoning.effort"),
        repeated=repeated,
    )


def _check(content: dict[str, Any]) -> None:
    """Raise ApiError for a parameter that would change the answer, if `_REFUSED` is not enough to say so."""
    given = {name for name, value in content.items() if value is not None}
    stateless = "is not supported by this server, which stores no responses: send the history in input"
    for name, is_refused, words in (
        ("previous_response_id", "previous_response_id" in given, stateless),
        ("conversation", "conversation" in given, stateless),
        ("max_tokens", "max_tokens" in given, "is a parameter of chats: send max_output_tokens"),
        ("n", content.get("n") not in (None, 1), "is a parameter of chats: leave it out"),
    ):
        if is_refused:
            raise _wrong(name, f"{name} {words}", "unsupported_parameter")


def _takes_logprobs(content: dict[str, Any]) -> bool:
    """Take the log-probabilities out of `include`, of which nothing else is honoured; return whether they are there."""
    include = content.get("include")
    if not isinstance(include, list) or _LOGPROBS not in include:
        return False
    content["include"] = [one for one in include if one != _LOGPROBS] or None
    return True


def _without_inner(content: dict[str, Any]) -> list[str]:
    """Leave only what is known in `reasoning` and `text`; return the names of the other fields, which are ignored.
    Raises ApiError for one that would change the answer."""
    ignored = list[str]()
    for param, known in (("reasoning", "effort"), ("text", "format")):
        if isinstance(given := content.get(param), dict):
            content[param] = {name: value for name, value in given.items() if name == known}
            ignored += [f"{param}.{name}" for name, value in given.items() if name != known and value is not None]
            if param == "text" and given.get("verbosity") not in (None, "medium"):
                message = "text.verbosity is not supported by this server: leave it out"
                raise _wrong("text.verbosity", message, "unsupported_parameter")
    return ignored


def _with_format(content: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the parameters with the format of the text as a chat has it, and the name of the one that brought it.
    Raises ApiError."""
    text = content.get("text")
    if text is None:
        return content, "response_format"
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(form, dict | None):
        raise _wrong("text", "text is no object with a format: send {'format': {'type': 'text'}}")
    given = {name: value for name, value in content.items() if name != "text"}
    param = "response_format"
    if form and form.get("type") != "text":
        param, described = FLAT, {name: value for name, value in form.items() if name != "type"}
        given["response_format"] = {"type": form.get("type")} | ({"json_schema": described} if described else {})
    return given, param


def _instructed(messages: list[ChatMessage], instructions: str) -> list[ChatMessage]:
    """Return messages behind the instructions, in one message of the system, since many templates take only one."""
    if not instructions:
        return messages
    if messages and messages[0].role == "system":
        return [ChatMessage("system", f"{instructions}\n\n{messages[0].content}"), *messages[1:]]
    return [ChatMessage("system", instructions), *messages]


class _Messages:
    """The messages that items amount to."""

    def __init__(self) -> None:
        self.written: list[ChatMessage] = []
        self.ignored: dict[str, None] = {}
        """The names of the fields of items that are ignored."""
        self._called: dict[str, str] = {}  # the function of each call, by its id
        self._own: ChatMessage | None = None  # of the assistant, to which more may belong

    def add_items(self, items: list[Any]) -> None:
        """Add the items of a request. Raises ApiError."""
        for index, item in enumerate(items):
            self._add(f"input[{index}]", item)
        self._end()

    def _add(self, place: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise _wrong("input", f"{place} is no object: send an item with its type")
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in _FIELDS:
            shown = plain(str(kind), _SHOWN)
            refused = f"{place} has the type {shown!r}: send only {', '.join(_FIELDS)}"
            raise _wrong("input", refused, "unsupported_parameter")
        known = ("id", "type", "status", *_FIELDS[kind])
        self.ignored.update((f"input.{name}", None) for name, value in item.items() if value and name not in known)
        if kind == "message":
            self._add_message(place, item)
        elif kind == "function_call":
            self._add_call(place, item)
        elif kind == "function_call_output":
            self._add_output(place, item)
        elif thought := read_text(f"{place}.content", item.get("content") or [], "input", ("reasoning_text",)):
            self._end()
            self._own = ChatMessage("assistant", "", thought=thought)

    def _add_message(self, place: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES or role == "tool":
            raise _wrong("input", f"{place}.role is not system, developer, user or assistant: choose one of them")
        text = read_text(f"{place}.content", item.get("content"), "input", _TEXTS)
        if role != "assistant":
            self._end()
            self.written.append(ChatMessage(ROLES[role], text))
            return
        if self._own is None or self._own.content or self._own.calls:
            self._end()
            self._own = ChatMessage("assistant", "")
        self._own = msgspec.structs.replace(self._own, content=text)

    def _add_call(self, place: str, item: dict[str, Any]) -> None:
        id = read_call_id(f"{place}.call_id", item.get("call_id"), "input")
        call = read_function_call(place, item, id, "input")
        own = self._own or ChatMessage("assistant", "")
        if len(own.calls) == CALLS_MAX:
            raise _wrong("input", f"{place} follows {CALLS_MAX} calls, the most: send their outputs first")
        self._own = msgspec.structs.replace(own, calls=(*own.calls, call))
        self._called[id] = call.name

    def _add_output(self, place: str, item: dict[str, Any]) -> None:
        self._end()
        id = read_call_id(f"{place}.call_id", item.get("call_id"), "input")
        if id not in self._called:
            raise _wrong("input", f"{place}.call_id is that of no call before it: send the call, too")
        text = read_text(f"{place}.output", item.get("output"), "input", _TEXTS)
        self.written.append(ChatMessage("tool", text, tool_call_id=id, name=self._called[id]))

    def _end(self) -> None:
        """End the assistant's message."""
        if self._own is not None:
            self.written.append(self._own)
        self._own = None


def _wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)
