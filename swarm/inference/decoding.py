"""Drawn tokens to text, piece by piece: no piece ends in half a letter, and none goes beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from peer.worker.text_client import ModelText

_UNFINISHED: Final = "\ufffd"
_TAIL_MAX: Final = 16  # tokens that may wait for the end of a letter; a real one has four bytes at most


class TextStream:
    """The text of one answer."""

    def __init__(self, model_text: ModelText, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`stops`: texts at which the answer ends, without them. `before`: the last tokens of the prompt, since some
        tokenizers write a token differently at the beginning of a text."""
        self.text = ""
        """What was given out."""
        self.stopped = False
        """Whether a stop string has come."""
        self._model_text, self._stops = model_text, tuple(filter(None, stops))
        self._context = list(before)[-_TAIL_MAX:]
        self._tail: list[int] = []
        self._held = ""

    async def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        if self.stopped:
            return ""
        self._tail.append(token)
        new = await self._new()
        if new.endswith(_UNFINISHED) and len(self._tail) < _TAIL_MAX:
            return ""
        self._context = (self._context + self._tail)[-_TAIL_MAX:]
        self._tail = []
        return self._give(self._held + new)

    async def finish(self) -> str:
        """Return what was held back."""
        if self.stopped:
            return ""
        rest = self._held + await self._new()
        self._tail, self._held = [], ""
        return self._give(rest, whole=True)

    def _give(self, text: str, whole: bool = False) -> str:
        at = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.stopped, text = True, text[:at]
            self._held = ""
        elif not whole:
            kept = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += text
        return text

    async def _new(self) -> str:
        """Return the text of the tail, behind what stands before it."""
        before, after = await self._model_text.decode(self._context, self._context + self._tail)
        return after[len(before) :] if after.startswith(before) else after


def _overlap(text: str, stop: str) -> int:
    """Return how long an end of `text` is that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
