"""Tools of a request: the functions that it offers, and the calls and results of its history, checked and bounded.

A template gets them as `transformers` gives them: functions as the client wrote them, arguments of calls as objects, or
as text where they are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from peer.plain_text import plain
from peer.worker.text_client import sound
from swarm.gateway.errors import ApiError
from swarm.gateway.json_depth import DEPTH_MAX, is_deep
from swarm.gateway.template import CALL_ID_CHARS_MAX, CALLS_MAX, PastCall

TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 256 << 10
"""Of all functions of a request, as JSON."""
NAME: Final = re.compile("[a-zA-Z0-9_-]{1,64}")
"""What OpenAI takes as the name of a function."""
_SHOWN: Final = 80
_FIELDS: Final = ("name", "description", "parameters")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}
_CHOICES: Final = ("none", "auto", "required")


@dataclass(frozen=True)
class Tools:
    """The functions that one request offers to the model."""

    given: tuple[dict[str, Any], ...]
    """As a template gets them."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""
    forced: tuple[str, ...] = ()
    """The functions of which an answer must call one; empty where it may be text."""

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The schema of each function's parameters, by the function's name."""
        return {one["function"]["name"]: one["function"]["parameters"] for one in self.given}


def read_tools(
    given: list[Any], choice: Any, is_parallel: bool, is_flat: bool = False
) -> tuple[Tools | None, list[str]]:
    """Return the functions that a request offers, None if the model is to call none, and the names of the fields that
    are ignored. `is_flat`: a function is described beside its type, not inside `function`. Raises ApiError."""
    if len(given) > TOOLS_MAX:
        raise _wrong("tools", f"tools has {len(given)} functions, more than {TOOLS_MAX}: send fewer")
    ignored: dict[str, None] = {}
    tools = [_tool(f"tools[{index}]", one, ignored, is_flat) for index, one in enumerate(given)]
    size = len(msgspec.json.encode(tools))
    if size > TOOLS_BYTES_MAX:
        raise _wrong("tools", f"tools has {size} bytes, more than {TOOLS_BYTES_MAX}: send fewer or shorter functions")
    known: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in known:
            raise _wrong("tools", f"tools[{index}] has the name {name} of another one: give each its own")
        known[name] = tool
    kept, forced = _chosen(known, choice)
    return (Tools(tuple(kept), is_parallel, forced) if kept else None), list(ignored)


def _tool(place: str, tool: Any, ignored: dict[str, None], is_flat: bool) -> dict[str, Any]:
    """Return a function as a template gets it."""
    if not isinstance(tool, dict):
        shown = "'name': ..." if is_flat else "'function': {...}"
        raise _wrong("tools", f"{place} is no object: send {{'type': 'function', {shown}}}")
    kind = tool.get("type", "function")
    if kind != "function":
        kind = plain(str(kind), _SHOWN)
        raise _wrong("tools", f"{place} has the type {kind!r}: send functions only", "unsupported_parameter")
    function = {name: value for name, value in tool.items() if name != "type"} if is_flat else tool.get("function")
    if not isinstance(function, dict):
        raise _wrong("tools", f"{place}.function is no object: send one with a name and parameters")
    inside = place if is_flat else f"{place}.function"
    _check_name("tools", f"{inside}.name", function.get("name"))
    if not isinstance(function.get("description") or "", str):
        raise _wrong("tools", f"{inside}.description is no text: send a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong("tools", f"{inside}.parameters is no object: send a JSON schema")
    if is_deep(parameters):
        raise _wrong("tools", f"{inside}.parameters is nested deeper than {DEPTH_MAX}: send a flatter schema")
    if not is_flat:
        ignored.update((f"tools.{name}", None) for name in tool if name not in ("type", "function"))
    ignored.update((f"tools.{name}", None) for name, value in function.items() if name not in _FIELDS and value)
    kept = {name: value for name, value in function.items() if name in _FIELDS and value is not None}
    return {"type": "function", "function": {**kept, "parameters": parameters or dict(_NO_PARAMETERS)}}


def _chosen(tools: dict[str, dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the functions that `tool_choice` leaves, and the names of those of which one must be called. Raises
    ApiError."""
    if choice is None or choice == "auto":
        return list(tools.values()), ()
    if choice == "none":
        return [], ()
    if choice == "required":
        if not tools:
            raise _wrong("tool_choice", "tool_choice is required and there are no tools: send some, or auto")
        return list(tools.values()), tuple(tools)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return list(tools.values()), (_allowed(tools, choice)["function"]["name"],)
    allowed = choice.get("allowed_tools", choice) if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and isinstance(named := allowed.get("tools"), list) and named:
        kept = [_allowed(tools, one) for one in named[:TOOLS_MAX]]
        if allowed.get("mode") == "auto":
            return kept, ()
        if allowed.get("mode") == "required":
            return kept, tuple(one["function"]["name"] for one in kept)
    raise _wrong("tool_choice", f"tool_choice is not one of {', '.join(_CHOICES)} or a function: choose one of them")


def _allowed(tools: dict[str, dict[str, Any]], named: Any) -> dict[str, Any]:
    function = named.get("function", named) if isinstance(named, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in tools:
        raise _wrong("tool_choice", f"tool_choice names {plain(str(name), _SHOWN)!r}, not in tools: name one of these")
    return tools[name]


# -- the history -------------------------------------------------------------------------------------------------------


def read_calls(place: str, given: Any, ignored: dict[str, None]) -> tuple[PastCall, ...]:
    """Return the calls of an assistant's message. Raises ApiError."""
    if not isinstance(given, list) or len(given) > CALLS_MAX:
        raise _wrong("messages", f"{place}.tool_calls is no list of at most {CALLS_MAX} calls: send one")
    return tuple(_call(f"{place}.tool_calls[{index}]", one, ignored) for index, one in enumerate(given))


def _call(place: str, call: Any, ignored: dict[str, None]) -> PastCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise _wrong("messages", f"{place} is no call of a function: send its id, type and function")
    ignored.update((f"messages.tool_calls.{name}", None) for name in call if name not in ("id", "type", "function"))
    return read_function_call(f"{place}.function", function, read_call_id(f"{place}.id", call.get("id")), "messages")


def read_function_call(place: str, call: Mapping[str, Any], id: str, param: str) -> PastCall:
    """Return a call by its name and arguments. Raises ApiError."""
    _check_name(param, f"{place}.name", call.get("name"))
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        raise _wrong(param, f"{place}.arguments is no text: send the arguments of the call in a string")
    return PastCall(id, call["name"], sound(arguments) if arguments.strip() else "{}")


def read_call_id(place: str, id: Any, param: str = "messages") -> str:
    """Return the id of a call. Raises ApiError."""
    if not isinstance(id, str) or not 0 < len(id) <= CALL_ID_CHARS_MAX:
        raise _wrong(param, f"{place} is no text of 1 to {CALL_ID_CHARS_MAX} characters: send the id of a call")
    return id


def _check_name(param: str, place: str, name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(param, f"{place} is {plain(str(name), _SHOWN)!r}: send 1 to 64 of a-z, A-Z, 0-9, _ and -")


def _wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)
