"""The JSON of a response: its output items, whole or as the numbered events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from swarm.gateway.answer import AnswerPart
from swarm.gateway.asks import GenerationAsk
from swarm.gateway.choices import Usage
from swarm.gateway.errors import ApiError
from swarm.gateway.openai import PIECE_CHARS
from swarm.gateway.reading.tool_calls import ToolCall
from swarm.inference.client import ModelClient

_ID_BYTES: Final = 24
_TEXT: Final = "output_text"
_KINDS: Final = {"message": ("msg", _TEXT), "reasoning": ("rs", "reasoning_text")}
"""Of items with text: what their ids begin with, and the type of their content."""


class ResponseFormat:
    """The format of one response. It holds the items so far."""

    last: Final = b""

    def __init__(self, ask: GenerationAsk, model: ModelClient) -> None:
        self._frame = {"id": _new_id("resp"), "object": "response", "created_at": int(time.time()), "model": model.name}
        self._repeated = ask.repeated
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._text: list[str] | None = None  # of the open one
        self._status = "completed"

    def whole(self, answers: Sequence[Sequence[AnswerPart]], usage: Usage, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response, of the parts of its one answer."""
        for part in answers[0]:
            self.chunks(0, part)
        return self._response(self._status, usage) | extras

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the events with which a response begins."""
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def chunks(self, index: int, part: AnswerPart) -> list[dict[str, Any]]:
        """Return the events of a part."""
        events = list[dict[str, Any]]()
        if part.thought:
            events += self._told("reasoning", part.thought)
        if part.text or (part.finish and not part.calls and not part.thought and not self._items):
            events += self._told("message", part.text)
        for call in part.calls:
            events += self._called(call)
        if part.finish is not None:
            self._status = "incomplete" if part.finish == "length" else "completed"
            events += self._closed(self._status)
        return events

    def end(self, usage: Usage, extras: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the event that has the whole response."""
        return [self._event(f"response.{self._status}", response=self._response(self._status, usage) | extras)]

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event that ends a stream early."""
        told = error.body["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def encode(self, event: dict[str, Any]) -> bytes:
        """Return an event as a stream has it: with its name."""
        name: str = event["type"]
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        return {
            **self._frame,
            **self._repeated,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "metadata": {},
            "output": list(self._items),
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _used(usage),
        }

    # -- items ---------------------------------------------------------------------------------------------------------

    def _told(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Add text to an item of a kind, which begins if it is not open."""
        events = list[dict[str, Any]]()
        prefix, content = _KINDS[kind]
        if self._text is None or self._items[-1]["type"] != kind:
            events += self._closed()
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = {"id": _new_id(prefix), "type": kind, "status": "in_progress", **more, "content": []}
            events.append(self._opened(item))
            events.append(self._inside("response.content_part.added", part=_part(content, "")))
            self._text = []
        assert self._text is not None
        if text:
            self._text.append(text)
            events.append(self._inside(f"response.{content}.delta", delta=text, **_logprobs(content)))
        return events

    def _called(self, call: ToolCall) -> list[dict[str, Any]]:
        """Add the item of a call."""
        name, given = call.name, call.arguments
        head = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id, "name": name}
        events = [*self._closed(), self._opened({**head, "arguments": ""})]
        where = {"item_id": head["id"], "output_index": len(self._items) - 1}
        deltas = [given[at : at + PIECE_CHARS] for at in range(0, len(given), PIECE_CHARS)]
        kind = "response.function_call_arguments"
        events += [self._event(f"{kind}.delta", **where, delta=delta) for delta in deltas]
        events.append(self._event(f"{kind}.done", **where, name=name, arguments=given))
        events.append(self._done({**head, "status": "completed", "arguments": given}))
        return events

    def _closed(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is open, if there is one."""
        if self._text is None:
            return []
        text, self._text = "".join(self._text), None
        item = self._items[-1]
        content = _KINDS[item["type"]][1]
        part = _part(content, text)
        return [
            self._inside(f"response.{content}.done", text=text, **_logprobs(content)),
            self._inside("response.content_part.done", part=part),
            self._done({**item, "status": status, "content": [part]}),
        ]

    def _opened(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items[-1] = item
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _inside(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the text in the open item."""
        number = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=number, content_index=0, **fields)


def _part(content: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if content == _TEXT else {}
    return {"type": content, "text": text, **more}


def _logprobs(content: str) -> dict[str, Any]:
    """Return the field that events of an answer's text have, and those of its thinking do not."""
    return {"logprobs": []} if content == _TEXT else {}


def _used(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.drawn,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.drawn,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(_ID_BYTES)}"
