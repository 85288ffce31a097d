"""A conversation of several turns with a served model, in one session for as long as its tokens only grow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from peer.errors import ConfigError
from peer.ipc.sampling_options import Sampling
from swarm.gateway.answer import AnswerPart, TextAnswer, end_session
from swarm.gateway.reading.thinking import ThoughtStream
from swarm.gateway.template import ChatMessage, ChatTemplate
from swarm.inference.client import ModelClient
from swarm.inference.session import RemoteSession


@dataclass
class Total:
    """Of all answers of a conversation so far, resets included."""

    answers: int = 0
    tokens: int = 0
    timed: int = 0
    """Tokens that came after the first one of an answer, in `seconds`."""
    seconds: float = 0.0
    failovers: int = 0

    def add(self, answer: TextAnswer, failovers: int) -> None:
        """Add an answer, for which this many servers were replaced."""
        self.answers += 1
        self.tokens += answer.tokens
        self.timed += max(0, answer.tokens - 1)
        self.seconds += answer.seconds
        self.failovers += failovers


class Conversation:
    """The messages so far, and the session whose servers know them."""

    def __init__(self, model: ModelClient, template: ChatTemplate, sampling: Sampling, tokens_max: int) -> None:
        """`tokens_max`: of one answer."""
        self.system = ""
        """The system prompt; "" for none."""
        self.messages: list[ChatMessage] = []
        self.last: TextAnswer | None = None
        """The last answer, or the one that comes in."""
        self.sessions = 0
        """How many sessions were begun."""
        self.total = Total()
        self._model, self._template = model, template
        self._sampling, self._tokens_max = sampling, tokens_max
        self._session: RemoteSession | None = None

    async def answer(self, text: str) -> AsyncGenerator[AnswerPart, None]:
        """Say `text` and yield the parts of the answer. A partial answer counts as said, should the caller stop early;
        a message without an answer does not. Raises ConfigError, NetworkError.

        Use it with `aclosing`.
        """
        self.last = None
        asked = [*self.messages, ChatMessage("user", text)]
        system = [ChatMessage("system", self.system)] if self.system else []
        whole = await self._template.render([*system, *asked])
        ids = await self._model.text.encode(whole, special=self._template.is_plain)
        room = self._model.manifest.model.max_seq_len - len(ids)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens, and the model's context {len(ids) + room}: begin a new one"
            )
        session, fresh = self._continued(ids)
        form = self._template.thinking
        thinking = None if form is None else ThoughtStream(form, form.is_open(whole))
        answer, failovers = TextAnswer(session, self._model, self._template.stops, thinking=thinking), session.failovers
        self.last = answer
        content, thought = list[str](), list[str]()
        try:
            async with aclosing(answer.parts(fresh, min(self._tokens_max, room))) as parts:
                async for part in parts:
                    content.append(part.text)
                    thought.append(part.thought)
                    yield part
        finally:
            if answer.tokens:
                self.total.add(answer, session.failovers - failovers)
                self.messages = [*asked, ChatMessage("assistant", "".join(content), thought="".join(thought))]

    @property
    def held(self) -> int:
        """How many tokens of the conversation the servers have."""
        return 0 if self._session is None else len(self._session.tokens)

    def _continued(self, ids: Sequence[int]) -> tuple[RemoteSession, Sequence[int]]:
        """Return the session to continue with, and the tokens that it does not have."""
        held = self._session
        if held is not None and len(held.tokens) < len(ids) and list(ids[: len(held.tokens)]) == held.tokens:
            return held, ids[len(held.tokens) :]
        self.close()
        self._session = self._model.session(self._sampling)
        self.sessions += 1
        return self._session, ids

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self.messages = []
        self.close()

    def close(self) -> None:
        """End the session at its servers."""
        if self._session is not None:
            end_session(self._model, self._session)
            self._session = None
