"""The outcome of an engine's step for one session: an output, or a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from peer.inference.prompt_scorer import Score
from peer.ipc.block_messages import RefusalCause


class StepRefused(Exception):
    """A step that cannot be made."""

    def __init__(self, cause: RefusalCause, message: str, have: int = 0) -> None:
        super().__init__(message)
        self.cause: RefusalCause = cause
        self.have = have
        """How many of the session's positions the span holds."""


@dataclass(frozen=True)
class StepOutput:
    """A step's output for one session."""

    session: int
    position: int
    """Of the first token that went in."""
    ids: Sequence[int]
    """Of the tokens that went in; none for a token that waited for its mask."""
    hidden: Tensor | None = None
    """(count, C) after the session's blocks, on the CPU; None after the last one."""
    token: int | None = None
    """The next token, where one was asked for."""
    logprob: float = 0.0
    likeliest: Sequence[tuple[int, float]] = ()
    logits: Tensor | None = None
    """(V,) of the last token, where they were asked for."""
    refusal: StepRefused | None = None
    """Why there is no output: the session then has what is before `position`."""
    scored_from: int = 0
    """The position of the first token of `scores`."""
    scores: Sequence[Score] = ()
    """Of tokens of the prompt, where they were asked for."""

    @property
    def count(self) -> int:
        """The number of tokens that went in."""
        return len(self.ids)
