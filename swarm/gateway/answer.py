"""One answer: the tokens that a session draws, as text, until it is long enough or something ends it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from peer.worker.text_client import TokenWord
from swarm.gateway.reading.thinking import ThoughtPiece, ThoughtStream
from swarm.gateway.reading.tool_calls import CallPiece, CallStream, FoundPart
from swarm.inference.client import ModelClient
from swarm.inference.decoding import TextStream
from swarm.inference.messages import TokenDrawn
from swarm.inference.prompt_scores import PromptToken
from swarm.inference.route import Route
from swarm.inference.session import RemoteSession

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer."""

    text: str
    drawn: tuple[TokenDrawn | PromptToken, ...]
    """The tokens that came since the last piece, of the prompt where it is echoed, without one that only ends the
    answer."""
    finish: Finish | None = None
    """In the last piece, why it is the last."""
    calls: tuple[CallPiece, ...] = ()
    """Pieces of calls of functions, after the text."""
    thought: str = ""
    """What the model thinks, before the text."""
    words: Mapping[int, TokenWord] = field(default_factory=dict)
    """Where log-probabilities are reported, each token that is named."""


class TextAnswer:
    """An answer in a session, which the caller closes."""

    def __init__(
        self,
        session: RemoteSession,
        model: ModelClient,
        stops: Sequence[str] = (),
        special: bool = False,
        calls: CallStream | None = None,
        thinking: ThoughtStream | None = None,
    ) -> None:
        """`stops`: texts at which the answer ends, without them. `special`: show special tokens, too. `calls`: finds
        calls of functions in the text. `thinking`: finds thinking before the text."""
        self.text = ""
        self.tokens = 0
        """How many were drawn."""
        self.thought_tokens = 0
        """How many of them were thinking, tags included."""
        self.lists_end = False
        """Whether a token that only ends the answer is among those of its last part, too."""
        self._first_at = self._last_at = 0.0
        self._session, self._model_text = session, model.text
        self._stop_tokens, self._stops = frozenset(model.manifest.text.stops), tuple(stops)
        self._hidden = frozenset[int]() if special else model.special
        self._calls, self._thinking = calls, thinking

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
        is_read = self._calls is not None or self._thinking is not None
        stream = TextStream(self._model_text, self._stops, before, self._hidden, is_read)
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
                    waiting += [drawn] if self.lists_end else []
                    break
                waiting.append(drawn)
                told = self._told(await stream.push(drawn.token), stream)
                if stream.stopped or (self._calls is not None and self._calls.is_done):
                    finish, last = "stop", told
                    break
                for one in told:
                    yield AnswerPart(one.text, tuple(waiting), calls=one.calls, thought=one.thought)
                    waiting.clear()
        last += self._told(await stream.finish(), stream)
        if self._thinking is not None:
            last += self._sorted(self._thinking.finish())
        if self._calls is not None:
            last += self._calls.finish()
        finish = "stop" if stream.stopped or self._session.drawing.is_complete else finish
        if finish == "stop" and self._calls is not None and self._calls.count:
            finish = "tool_calls"
        for one in last[:-1]:
            yield AnswerPart(one.text, tuple(waiting), calls=one.calls, thought=one.thought)
            waiting.clear()
        end = last[-1] if last else FoundPart()
        yield AnswerPart(end.text, tuple(waiting), finish, calls=end.calls, thought=end.thought)

    def _told(self, text: str, stream: TextStream) -> list[FoundPart]:
        """Return what the last token has made certain. `text`: what it has in `stream`."""
        self.text = stream.text
        if self._thinking is None:
            if self._calls is None:
                return [FoundPart(text)] if text else []
            return self._sorted([ThoughtPiece(piece, is_shown=is_shown) for piece, is_shown in stream.pieces])
        was_thinking, found = self._thinking.is_thinking, list[ThoughtPiece]()
        for piece, is_shown in stream.pieces:
            found += self._thinking.push(piece, is_shown)
        if was_thinking or self._thinking.is_thinking or any(one.is_thought for one in found):
            self.thought_tokens = self.tokens
        return self._sorted(found)

    def _sorted(self, pieces: Sequence[ThoughtPiece]) -> list[FoundPart]:
        """Return pieces as thinking, text and calls."""
        found = list[FoundPart]()
        for one in pieces:
            if one.is_thought:
                found.append(FoundPart(thought=one.text))
            elif self._calls is not None:
                found += self._calls.push(one.text, one.is_shown)
            elif one.is_shown:
                found.append(FoundPart(one.text))
        return found


async def prompt_then_answer(
    session: RemoteSession, answer: TextAnswer, ids: Sequence[int], count: int, text: str
) -> AsyncGenerator[AnswerPart, None]:
    """Yield the prompt, which has this `text`, and the parts of an answer of up to `count` tokens: of 0 none.
    Raises what the session does. Use it with `aclosing`."""
    if not session.drawing.scores.is_asked:
        yield AnswerPart(text, (), None if count else "length")
        if not count:
            return
    if not count:
        async with aclosing(session.generate(ids, 0)) as tokens:
            await anext(tokens)  # the token after the prompt, which is not wanted: the scores are complete with it
        yield AnswerPart(text, tuple(session.drawing.scores.of(ids)), "length")
        return
    async with aclosing(answer.parts(ids, count)) as parts:
        is_first = session.drawing.scores.is_asked
        async for part in parts:
            if is_first:
                yield AnswerPart(text, tuple(session.drawing.scores.of(ids)))
                is_first = False
            yield part


def end_session(model: ModelClient, session: RemoteSession) -> None:
    """End a session that is not used again."""
    session.close()
    model.server_flows.remove(session)


def route_text(route: Route) -> str:
    """Return a route as the response header has it: each server's peer id and its blocks."""
    return ", ".join(f"{hop.peer}={hop.first}:{hop.end}" for hop in route)
