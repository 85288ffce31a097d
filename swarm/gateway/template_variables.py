"""Variables of the chat template that a request sets: `chat_template_kwargs`, and `reasoning_effort` in the names that
templates have for it, as vLLM and SGLang give them.

A template that does not read a variable writes the same text without it: then the field is ignored, and listed as such.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from peer.ipc.text_messages import TEMPLATE_NAMES
from peer.plain_text import plain
from swarm.gateway.errors import ApiError
from swarm.gateway.json_depth import DEPTH_MAX, is_deep

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Those that OpenAI and vLLM take."""
VARIABLES_BYTES_MAX: Final = 16 << 10
"""Of all variables of a request, as JSON."""
_GIVEN: Final = "chat_template_kwargs"
_NAME: Final = re.compile("[a-zA-Z][a-zA-Z0-9_]{0,63}")
_TAKEN: Final = TEMPLATE_NAMES | {"chat_template", "continue_final_message", "tokenize"}
"""Names that are none of variables: also those of the arguments of `transformers`' `apply_chat_template`."""


@dataclass(frozen=True)
class Variables:
    """The variables of one request."""

    effort: Mapping[str, Any]
    """Those of `reasoning_effort`; empty without it."""
    given: Mapping[str, Any]
    """Those of `chat_template_kwargs`, which count where both have a name."""
    field: str
    """The parameter that has the effort."""
    has_given: bool

    def read_by(self, names: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the variables that a template with these names reads, and the fields that are ignored since it does
        not read them."""
        effort = {name: value for name, value in self.effort.items() if name in names}
        given = {name: value for name, value in self.given.items() if name in names}
        ignored = [self.field] if self.effort and not effort else []
        if self.has_given and not given:
            ignored.append(_GIVEN)
        else:
            ignored += [f"{_GIVEN}.{name}" for name in self.given if name not in given]
        return effort | given, tuple(ignored)


NO_VARIABLES: Final = Variables({}, {}, "", has_given=False)


def read_variables(
    effort: Effort | None, given: Mapping[str, Any] | None, field: str = "reasoning_effort"
) -> Variables:
    """Return what a request sets. `field`: the parameter that has the effort. Raises ApiError."""
    for name in given or ():
        if name in _TAKEN:
            raise _wrong(f"{_GIVEN}.{name} is a name of the template's own: leave it out")
        if not _NAME.fullmatch(name):
            raise _wrong(f"{_GIVEN} has the name {plain(name, 80)!r}: send 1 to 64 of a-z, A-Z, 0-9 and _")
    if is_deep(given):
        raise _wrong(f"{_GIVEN} is nested deeper than {DEPTH_MAX}: send flatter values")
    size = len(msgspec.json.encode(given))
    if size > VARIABLES_BYTES_MAX:
        raise _wrong(f"{_GIVEN} has {size} bytes, more than {VARIABLES_BYTES_MAX}: send less")
    return Variables({} if effort is None else _of_effort(effort), given or {}, field, has_given=given is not None)


def _of_effort(effort: Effort) -> dict[str, Any]:
    """Return the variables of an effort. As vLLM has it, each effort but "none" turns thinking on where a template asks
    `enable_thinking`; as SGLang has it, "none" turns off that and `thinking`."""
    off = {"thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **off}


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=_GIVEN)
