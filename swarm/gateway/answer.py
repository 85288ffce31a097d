"""One answer: the tokens that a session draws, as text, until it is long enough or something ends it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from swarm.gateway.tool_calls import CallStream, FoundPart, ToolCall
from swarm.inference.client import ModelClient
from swarm.inference.decoding import TextStream
from swarm.inference.messages import TokenDrawn
from swarm.inference.route import Route
from swarm.inference.session import RemoteSession

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer."""

    text: str
    drawn: tuple[TokenDrawn, ...]
    """The tokens that came since the last piece, without one that only ends the answer."""
    finish: Finish | None = None
    """In the last piece, why it is the last."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of functions, behind the text."""
    words: Mapping[int, str] = field(default_factory=dict)
    """Where log-probabilities are reported, the text of each token that is named."""


class TextAnswer:
    """An answer in a session, which the caller closes."""

    def __init__(
        self,
        session: RemoteSession,
        model: ModelClient,
        stops: Sequence[str] = (),
        special: bool = False,
        calls: CallStream | None = None,
    ) -> None:
        """`stops`: texts at which the answer ends, without them. `special`: show special tokens, too. `calls`: finds
        calls of functions in the text."""
        self.text = ""
        self.tokens = 0
        """How many were drawn."""
        self._first_at = self._last_at = 0.0
        self._session, self._model_text = session, model.text
        self._stop_tokens, self._stops = frozenset(model.manifest.text.stops), tuple(stops)
        self._hidden = frozenset[int]() if special else model.special
        self._calls = calls

    @property
    def route(self) -> Route:
        return self._session.route

    @property
    def failovers(self) -> int:
        return self._session.failovers

    @property
    def tokens_a_second(self) -> float:
        """How fast tokens came after the first one; 0 for fewer than two."""
        return (self.tokens - 1) / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        """From the first token to the last one."""
        return self._last_at - self._first_at

    async def parts(self, prompt: Sequence[int], count: int) -> AsyncGenerator[AnswerPart, None]:
        """Append `prompt` to the session and yield the answer, of up to `count` tokens. Raises what the session does.

        Use it with `aclosing`.
        """
        before = [*self._session.tokens, *prompt]
        stream = TextStream(self._model_text, self._stops, before, self._hidden, self._calls is not None)
        waiting = list[TokenDrawn]()
        finish: Finish = "length"
        last = list[FoundPart]()
        async with aclosing(self._session.generate(prompt, count)) as tokens:
            async for drawn in tokens:
                self.tokens += 1
                self._last_at = time.monotonic()
                self._first_at = self._first_at or self._last_at
                if drawn.token in self._stop_tokens:
                    finish = "stop"
                    break
                waiting.append(drawn)
                told = self._told(await stream.push(drawn.token), stream)
                if stream.stopped or (self._calls is not None and self._calls.is_done):
                    finish, last = "stop", told
                    break
                for one in told:
                    yield AnswerPart(one.text, tuple(waiting), calls=one.calls)
                    waiting.clear()
        last += self._told(await stream.finish(), stream)
        if self._calls is not None:
            last += self._calls.finish()
        finish = "stop" if stream.stopped or self._session.is_complete else finish
        if finish == "stop" and self._calls is not None and self._calls.count:
            finish = "tool_calls"
        for one in last[:-1]:
            yield AnswerPart(one.text, tuple(waiting), calls=one.calls)
            waiting.clear()
        end = last[-1] if last else FoundPart()
        yield AnswerPart(end.text, tuple(waiting), finish, calls=end.calls)

    def _told(self, text: str, stream: TextStream) -> list[FoundPart]:
        """Return what the last token has made certain. `text`: what it has in `stream`."""
        self.text = stream.text
        if self._calls is None:
            return [FoundPart(text)] if text else []
        return [told for piece, is_shown in stream.pieces for told in self._calls.push(piece, is_shown)]


def end_session(model: ModelClient, session: RemoteSession) -> None:
    """End a session that is not used again."""
    session.close()
    model.server_flows.remove(session)


def route_text(route: Route) -> str:
    """Return a route as the response header has it: each server's peer id and its blocks."""
    return ", ".join(f"{hop.peer}={hop.first}:{hop.end}" for hop in route)
