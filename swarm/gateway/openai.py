"""The JSON of OpenAI's answers: whole ones, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from peer.worker.text_client import TokenWord
from swarm.gateway.answer import AnswerPart, Finish
from swarm.gateway.asks import THOUGHT
from swarm.gateway.choices import Usage
from swarm.gateway.errors import ApiError
from swarm.gateway.reading.tool_calls import CallPiece
from swarm.inference.messages import TokenDrawn
from swarm.inference.prompt_scores import PromptToken

Kind = Literal["chat", "text"]
Words = Mapping[int, TokenWord]
Listed = TokenDrawn | PromptToken
_ID_BYTES: Final = 12
_OBJECTS: Final = {"chat": ("chat.completion", "chat.completion.chunk"), "text": ("text_completion", "text_completion")}
PIECE_CHARS: Final = 256
"""Of a call's arguments, in one chunk of a stream at most."""


class AnswerFormat:
    """The format of the answers to one request. `logprobs`: how many of the likeliest tokens are reported; None: none.
    `hidden`: tokens that are not in the text. `has_usage`: a stream ends with the usage."""

    last: Final = b"data: [DONE]\n\n"

    def __init__(
        self,
        kind: Kind,
        model: str,
        logprobs: int | None,
        hidden: Collection[int] = (),
        has_usage: bool = False,
    ) -> None:
        self._kind: Kind = kind
        self._logprobs, self._hidden, self._has_usage = logprobs, hidden, has_usage
        self._lengths: dict[int, int] = {}  # of each choice's text so far
        self._calls: dict[int, int] = {}  # how many each choice has had
        self._frame = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(_ID_BYTES)}",
            "created": int(time.time()),
            "model": model,
        }

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return the chunk that begins a choice, if there is one."""
        if self._kind == "text":
            return []
        return [self._chunk([_chat_choice(index, "delta", {"role": "assistant", "content": ""}, None, None)])]

    def chunks(self, index: int, part: AnswerPart) -> list[dict[str, Any]]:
        """Return the chunks of a part. A chat's last chunk says only why the answer ends."""
        told = self._told(index, part.text, part.drawn, part.words)
        if self._kind == "text":
            return [self._chunk([_text_choice(index, part.text, told, part.finish)])]
        found = list[dict[str, Any]]()
        if part.thought:
            found.append(self._chunk([_chat_choice(index, "delta", {THOUGHT: part.thought}, told, None)]))
            told = None
        if part.text or (part.drawn and told is not None):
            found.append(self._chunk([_chat_choice(index, "delta", {"content": part.text}, told, None)]))
        for piece in part.calls:
            number = self._calls[index] = self._calls.get(index, -1) + piece.is_first
            found += [
                self._chunk([_chat_choice(index, "delta", {"tool_calls": [delta]}, None, None)])
                for delta in _call_deltas(number, piece)
            ]
        if part.finish is not None:
            found.append(self._chunk([_chat_choice(index, "delta", {}, None, part.finish)]))
        return found

    def end(self, usage: Usage, extras: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunk that tells the usage, if it is wanted."""
        return [{**self._chunk([]), "usage": _used(usage), **extras}] if self._has_usage else []

    def error(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body]

    def encode(self, event: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    def whole(self, answers: Sequence[Sequence[AnswerPart]], usage: Usage, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response, of the parts of each answer."""
        choices = [self._choice(index, parts) for index, parts in enumerate(answers)]
        name = _OBJECTS[self._kind][0]
        return {**self._frame, "object": name, "choices": choices, "usage": _used(usage), **extras}

    def _choice(self, index: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        words = {token: word for part in parts for token, word in part.words.items()}
        told = self._told(index, text, [drawn for part in parts for drawn in part.drawn], words)
        finish = parts[-1].finish if parts else None
        if self._kind == "text":
            return _text_choice(index, text, told, finish)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought := "".join(part.thought for part in parts):
            message |= {"content": text or None, THOUGHT: thought}
        if calls := _calls([piece for part in parts for piece in part.calls]):
            message |= {"content": text or None, "tool_calls": calls}
        return _chat_choice(index, "message", message, told, finish)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._frame, "object": _OBJECTS[self._kind][1], "choices": choices}
        return chunk | ({"usage": None} if self._has_usage else {})

    # -- log-probabilities ---------------------------------------------------------------------------------------------

    def _told(self, index: int, text: str, drawn: Sequence[Listed], words: Words) -> dict[str, Any] | None:
        """Return the log-probabilities of the drawn tokens; None if none were asked for. `text`: of these tokens.
        `words`: each token that is named."""
        begin = self._lengths.get(index, 0)
        self._lengths[index] = begin + len(text)
        if self._logprobs is None:
            return None
        if self._kind == "chat":
            return {"content": [token_values(one, words, self._logprobs) for one in drawn], "refusal": None}
        offsets, at = list[int](), begin
        for one in drawn:
            offsets.append(at)
            at += 0 if one.token in self._hidden else len(words[one.token].text)
        return {
            "tokens": [_name(one.token, words) for one in drawn],
            "token_logprobs": [one.logprob for one in drawn],
            "top_logprobs": [self._likeliest(one, words) for one in drawn] if self._logprobs else None,
            "text_offset": offsets,
        }

    def _likeliest(self, drawn: Listed, words: Words) -> dict[str, float] | None:
        """Return the likeliest tokens of a completion, and the drawn one; None for the first one of a prompt. Of two
        with the same text the likelier counts."""
        if drawn.logprob is None:
            return None
        told = {_name(token, words): logprob for token, logprob in reversed(drawn.likeliest[: self._logprobs])}
        return {**dict(reversed(told.items())), _name(drawn.token, words): drawn.logprob}


def token_values(drawn: Listed, words: Words, most: int) -> dict[str, Any]:
    """Return a token of a chat with its log-probability and those of at most `most` of the likeliest. `words`: each of
    these tokens."""
    return {
        **_valued(drawn.logprob, words[drawn.token]),
        "top_logprobs": [_valued(logprob, words[token]) for token, logprob in drawn.likeliest[:most]],
    }


def _valued(logprob: float | None, word: TokenWord) -> dict[str, Any]:
    return {"token": word.text, "logprob": logprob, "bytes": None if word.content is None else list(word.content)}


def _name(token: int, words: Words) -> str:
    """Return a token's text; of a part of a letter, whose text many tokens share, its id as vLLM writes it."""
    return f"token_id:{token}" if words[token].is_part else words[token].text


def _calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    """Return whole calls, of their pieces."""
    arguments = dict[str, list[str]]()
    for piece in pieces:
        arguments.setdefault(piece.id, []).append(piece.arguments)
    return [_call(piece, "".join(arguments[piece.id])) for piece in pieces if piece.is_first]


def _call(begin: CallPiece, arguments: str) -> dict[str, Any]:
    return {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": arguments}}


def _call_deltas(number: int, piece: CallPiece) -> list[dict[str, Any]]:
    """Return a piece of a call as a stream has it: the name, where it begins, then its arguments."""
    begin = [{"index": number, **_call(piece, "")}] if piece.is_first else []
    return [*begin, *({"index": number, "function": {"arguments": text}} for text in argument_deltas(piece))]


def argument_deltas(piece: CallPiece) -> list[str]:
    """Return the arguments of a piece in parts, each for one event of a stream."""
    return [piece.arguments[at : at + PIECE_CHARS] for at in range(0, len(piece.arguments), PIECE_CHARS)]


def _used(usage: Usage) -> dict[str, Any]:
    total = usage.prompt + usage.drawn
    used = {"prompt_tokens": usage.prompt, "completion_tokens": usage.drawn, "total_tokens": total}
    return used | ({"completion_tokens_details": {"reasoning_tokens": usage.thought}} if usage.thought else {})


def _chat_choice(
    index: int, name: str, message: dict[str, Any], logprobs: dict[str, Any] | None, finish: Finish | None
) -> dict[str, Any]:
    return {"index": index, name: message, "logprobs": logprobs, "finish_reason": finish}


def _text_choice(index: int, text: str, logprobs: dict[str, Any] | None, finish: Finish | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
