"""Drawn tokens to text, piece by piece: no piece ends in half a letter, and none goes beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from peer.worker.text_client import ModelText

_UNFINISHED: Final = "\ufffd"
_LETTER_BYTES: Final = 4
_TAIL_MAX: Final = 16  # tokens that may wait for the end of a letter, which has four at most, and of such signs before


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
        self._before = list(before)[-_TAIL_MAX:]
        self._context: list[int] | None = None  # of the text that stands before the tail, from a whole letter on
        self._tail: list[int] = []
        self._held = ""

    async def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        if self.stopped:
            return ""
        self._tail.append(token)
        new = await self._new()
        if len(self._tail) < _TAIL_MAX and (not new or new.endswith(_UNFINISHED)):
            return ""
        self._context = self._tail if new else self._context
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
        if self._context is None:
            self._context = await self._whole(self._before)
        before, after = await self._model_text.decode(self._context, self._context + self._tail)
        if after.startswith(before):
            return after[len(before) :]
        return (await self._model_text.decode(self._tail))[0]  # bytes that are no text have spoilt those before

    async def _whole(self, ids: list[int]) -> list[int]:
        """Return the tokens from a whole letter on. Of bytes in a row a tokenizer may show none if one is alone."""
        starts = [ids[cut:] for cut in range(_LETTER_BYTES)]
        texts = await self._model_text.decode(*starts)
        return next((start for start, text in zip(starts, texts, strict=True) if text[:1] != _UNFINISHED), ids)


def _overlap(text: str, stop: str) -> int:
    """Return how long an end of `text` is that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
