"""The log-probabilities of a prompt's tokens as they come from the last server of a session, each position once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.ipc.sampling_options import Sampling
from swarm.inference.messages import PromptLogprobs


@dataclass(frozen=True)
class PromptToken:
    """A token of a prompt."""

    token: int
    logprob: float | None = None
    """None for the first one, which follows nothing."""
    likeliest: tuple[tuple[int, float], ...] = ()


class PromptScores:
    """Of one session: the scores of its last prompt, from position 1 on. Where none are asked for, none are missing."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self.is_asked = sampling.prompt_logprobs
        self._count, self._vocab_size = min(sampling.logprobs, vocab_size), vocab_size
        self._found: list[tuple[float, tuple[tuple[int, float], ...]]] = []
        self._end = 0

    def begin(self, end: int) -> None:
        """Ask for the positions before `end`."""
        self._end = end
        self._found.clear()

    def forget(self) -> None:
        """Drop what has come: another session, maybe with other weights, computes all again."""
        self._found.clear()

    @property
    def is_complete(self) -> bool:
        """Whether none is missing."""
        return not self.is_asked or len(self._found) + 1 >= self._end

    def row(self, known: int) -> int:
        """Return the first position whose output is needed yet: the token after it has no score, or after the `known`
        ones is to be drawn."""
        return known - 1 if self.is_complete else min(known - 1, len(self._found))

    def take(self, message: PromptLogprobs) -> bool:
        """Add the scores that are new. Return whether a good server may have sent this. It may also have sent some to a
        lost flow, and those behind them before it is told to go back: they come again."""
        here = message.position - 1
        if not self.is_asked or message.position + len(message.scores) > self._end:
            return False
        if not all(map(self._is_sound, message.scores)):
            return False
        if here <= len(self._found):
            self._found += message.scores[len(self._found) - here :]
        return True

    def _is_sound(self, score: tuple[float, tuple[tuple[int, float], ...]]) -> bool:
        logprob, likeliest = score
        values = [value for _, value in likeliest]
        tokens = {token for token, _ in likeliest}
        return (
            len(tokens) == len(likeliest) == self._count
            and max(tokens) < self._vocab_size
            and logprob <= values[0] <= 0.0
            and values == sorted(values, reverse=True)
        )

    def of(self, tokens: Sequence[int]) -> list[PromptToken]:
        """Return the prompt, the first of these tokens, with what has come."""
        scored = [PromptToken(token, *score) for token, score in zip(tokens[1:], self._found, strict=False)]
        return [PromptToken(tokens[0]), *scored]
