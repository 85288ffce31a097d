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
from swarm.gateway.openai import argument_deltas, token_values
from swarm.gateway.reading.tool_calls import CallPiece
from swarm.inference.client import ModelClient

_ID_BYTES: Final = 24
_TEXT: Final = "output_text"
_ARGUMENTS: Final = "response.function_call_arguments"
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
        self._text: list[str] | None = None  # of the open one, or its arguments
        self._most = ask.logprobs  # of the likeliest tokens for each; None: no log-probabilities
        self._tokens: list[dict[str, Any]] = []  # of the open one, with their log-probabilities
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
            events += self._told("message", part.text, [] if part.thought else self._listed(part))
        for piece in part.calls:
            events += self._called(piece)
        if part.finish is not None:
            self._status = "incomplete" if part.finish == "length" else "completed"
            events += self._closed(self._status)
        return events

    def end(self, usage: Usage, extras: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the event that has the whole response."""
        return [self._event(f"response.{self._status}", response=self._response(self._status, usage) | extras)]

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the events that end a stream early: the error, and the response that has failed, with its whole
        items."""
        told = error.body["error"]
        whole = self._items if self._text is None else self._items[:-1]
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # OpenAI's own names, of which it is one
        failed = {"error": {"code": code, "message": told["message"]}, "output": list(whole)}
        return [
            self._event("error", code=told["code"], message=told["message"], param=told["param"]),
            self._event("response.failed", response=self._response("failed") | failed),
        ]

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

    def _listed(self, part: AnswerPart) -> list[dict[str, Any]]:
        """Return the tokens of a part with their log-probabilities, where those are wanted."""
        if self._most is None:
            return []
        values = [token_values(one, part.words, self._most) for one in part.drawn]
        return [_with_bytes(one) | {"top_logprobs": list(map(_with_bytes, one["top_logprobs"]))} for one in values]

    def _told(self, kind: str, text: str, tokens: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Add text to an item of a kind, which begins if it is not open. `tokens`: with their log-probabilities."""
        events = list[dict[str, Any]]()
        prefix, content = _KINDS[kind]
        if self._text is None or self._items[-1]["type"] != kind:
            events += self._closed()
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            item = {"id": _new_id(prefix), "type": kind, "status": "in_progress", **more, "content": []}
            events.append(self._opened(item))
            events.append(self._inside("response.content_part.added", part=_part(content, "", ())))
            self._text, self._tokens = [], []
        assert self._text is not None
        if text:
            self._text.append(text)
            self._tokens += tokens
            events.append(self._inside(f"response.{content}.delta", delta=text, **_logprobs(content, tokens)))
        return events

    def _called(self, piece: CallPiece) -> list[dict[str, Any]]:
        """Add a piece to the item of a call, which begins with its first one."""
        events = list[dict[str, Any]]()
        if piece.is_first:
            events += self._closed()
            item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": piece.id}
            events.append(self._opened({**item, "name": piece.name, "arguments": ""}))
            self._text = []
        assert self._text is not None
        self._text.append(piece.arguments)
        events += [self._of_item(f"{_ARGUMENTS}.delta", delta=delta) for delta in argument_deltas(piece)]
        return events + (self._closed(piece.end) if piece.end else [])

    def _closed(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is open, if there is one."""
        if self._text is None:
            return []
        text, self._text = "".join(self._text), None
        item = self._items[-1]
        if item["type"] == "function_call":
            return [
                self._of_item(f"{_ARGUMENTS}.done", name=item["name"], arguments=text),
                self._done({**item, "status": status, "arguments": text}),
            ]
        content = _KINDS[item["type"]][1]
        part = _part(content, text, self._tokens)
        return [
            self._inside(f"response.{content}.done", text=text, **_logprobs(content, self._tokens)),
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
        """Return an event of the text in the last item."""
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        number = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1]["id"], output_index=number, **fields)


def _part(content: str, text: str, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if content == _TEXT else {}
    return {"type": content, "text": text, **more, **_logprobs(content, tokens)}


def _logprobs(content: str, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the field that an answer's text has, and its thinking has not."""
    return {"logprobs": list(tokens)} if content == _TEXT else {}


def _with_bytes(token: dict[str, Any]) -> dict[str, Any]:
    """Return a token whose bytes are a list, as OpenAI's responses have them: an empty one where they are unknown."""
    return token | {"bytes": token["bytes"] or []}


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
