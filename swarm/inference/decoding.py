"""Drawn tokens to text, piece by piece: no piece ends in half a letter, and none goes beyond a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from peer.worker.text_client import ModelText

_UNFINISHED: Final = "\ufffd"
_LETTER_BYTES: Final = 4
_TAIL_MAX: Final = 16  # tokens that may wait for the end of a letter, which has four at most, and of such signs before


class TextStream:
    """The text of one answer."""

    def __init__(
        self,
        model_text: ModelText,
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
        hidden: Collection[int] = (),
        is_telling: bool = False,
    ) -> None:
        """`stops`: texts at which the answer ends, without them. `before`: the last tokens of the prompt, since some
        tokenizers write a token differently at the beginning of a text. `hidden`: tokens that are not shown; a stop may
        name them all the same. `is_telling`: `pieces` has them, too."""
        self.text = ""
        """What was given out."""
        self.stopped = False
        """Whether a stop string has come."""
        self.pieces: list[tuple[str, bool]] = []
        """What the last call has given out, and between it the hidden tokens; each with whether it is shown."""
        self._is_telling = is_telling
        self._model_text, self._stops, self._hidden = model_text, tuple(filter(None, stops)), hidden
        self._before = list(before)[-_TAIL_MAX:]
        self._context: list[int] | None = None  # of the text that stands before the tail, from a whole letter on
        self._tail: list[int] = []
        self._held: list[tuple[str, bool]] = []  # each with whether it is shown

    async def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        self.pieces = []
        if self.stopped:
            return ""
        if token in self._hidden:
            return await self._pass_over(token)
        self._tail.append(token)
        new = await self._new()
        if len(self._tail) < _TAIL_MAX and (not new or new.endswith(_UNFINISHED)):
            return ""
        self._end_tail(new)
        return self._give()

    async def finish(self) -> str:
        """Return what was held back."""
        self.pieces = []
        if self.stopped:
            return ""
        self._end_tail(await self._new())
        return self._give(whole=True)

    async def _pass_over(self, token: int) -> str:
        """Add a token that is not shown. As where `transformers` skips it, the letters around it are one text."""
        if not self._stops and not self._is_telling:
            return ""
        if self._is_telling and self._tail:
            self._end_tail(await self._new())
        (word,) = await self._model_text.decode([token])
        self._held.append((word, False))
        return self._give()

    def _end_tail(self, new: str) -> None:
        """Hold the text of the tail, which later tokens do not change."""
        self._context = self._tail if new else self._context
        self._tail = []
        self._held.append((new, True))

    def _give(self, whole: bool = False) -> str:
        """Return what is held, up to where a stop string begins, or may begin unless this is the `whole` text."""
        text = "".join(piece for piece, _ in self._held)
        at = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=-1)
        self.stopped = at >= 0
        if not self.stopped:
            at = len(text) - (0 if whole else max((overlap(text, stop) for stop in self._stops), default=0))
        given, rest = "", list[tuple[str, bool]]()
        for piece, is_shown in self._held:
            cut = max(0, min(at, len(piece)))
            at -= len(piece)
            given += piece[:cut] if is_shown else ""
            self.pieces += [(piece[:cut], is_shown)] if cut else []
            rest += [(piece[cut:], is_shown)] if piece[cut:] else []
        self._held = [] if self.stopped else rest
        self.text += given
        return given

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


def overlap(text: str, stop: str) -> int:
    """Return how long an end of `text` is that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
