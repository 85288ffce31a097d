"""Thinking in an answer, between two tags, told apart from its content piece by piece: one table of tags, chosen by
the chat template. Pieces of any size give the same thinking and the same content.

An answer thinks once, where it begins. Where the template writes the tag itself, the answer begins inside. A tag in any
other place is text, as the model wrote it; thinking that never ends is thinking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from swarm.inference.decoding import overlap

SPACE_CHARS_MAX: Final = 256
"""White space before a tag, which is left out; more is text, so that the time for a piece does not grow with it."""


@dataclass(frozen=True)
class ThinkingFormat:
    """The tags around a model's thinking. They may be special tokens."""

    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Return whether an answer to this prompt begins inside the thinking."""
        return prompt.rstrip().endswith(self.begin)


FORMATS: Final = (
    ThinkingFormat("<think>", "</think>"),  # DeepSeek, Qwen, and most others
    ThinkingFormat("[THINK]", "[/THINK]"),  # Mistral
    ThinkingFormat("<seed:think>", "</seed:think>"),
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
)


def thinking_of(template: str) -> ThinkingFormat | None:
    """Return the tags of the model with this template; None if the template names none."""
    return next((form for form in FORMATS if form.end in template), None)


@dataclass(frozen=True)
class ThoughtPiece:
    """A piece of an answer, of which it is certain whether it is thinking."""

    text: str
    is_thought: bool = False
    is_shown: bool = True
    """False for a hidden special token."""


class ThoughtStream:
    """Finds the thinking in one answer."""

    def __init__(self, form: ThinkingFormat, is_open: bool = False) -> None:
        """`is_open`: whether the answer begins inside."""
        self.is_thinking = is_open
        """Whether the last piece has left the answer inside its thinking."""
        self._form = form
        self._is_beginning = not is_open  # whether thinking may still begin
        self._first: list[ThoughtPiece] = []  # what came meanwhile
        self._text = ""  # of what came meanwhile, or of thinking that is not told yet
        self._skips_space = True  # whether what comes next is white space behind a tag

    def push(self, text: str, is_shown: bool = True) -> list[ThoughtPiece]:
        """Add a piece; return what is now certain, in order. `is_shown`: False for a hidden special token, which
        counts if it is the tag that may come, is left out of thinking, and is returned as such in the content."""
        if self.is_thinking:
            return self._thought(text) if is_shown or text.strip() == self._form.end else []
        if not self._is_beginning:
            return self._content(ThoughtPiece(text, is_shown=is_shown))
        if text:
            self._first.append(ThoughtPiece(text, is_shown=is_shown))
        if is_shown or text.strip() == self._form.begin:
            self._text += text
        return self._begun()

    def finish(self) -> list[ThoughtPiece]:
        """Return what was held back."""
        if not self.is_thinking:
            return self._taken()
        text, self._text = self._text, ""
        return [ThoughtPiece(text, is_thought=True)] if text else []

    def _begun(self) -> list[ThoughtPiece]:
        """Tell the first pieces once they are no thinking; hold them while they may be."""
        begin, rest = self._form.begin, self._text.lstrip()
        if len(self._text) - len(rest) > SPACE_CHARS_MAX or not begin.startswith(rest[: len(begin)]):
            return self._taken()
        if len(rest) < len(begin):
            return []
        self._first, self._text = [], ""
        self._is_beginning, self.is_thinking = False, True
        return self._thought(rest[len(begin) :])

    def _taken(self) -> list[ThoughtPiece]:
        """Return the first pieces as content, white space included."""
        first, self._first, self._text = self._first, [], ""
        self._is_beginning = self._skips_space = False
        return first

    def _thought(self, text: str) -> list[ThoughtPiece]:
        """Tell thinking up to where its end may begin, without the white space around it."""
        self._text += text
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
        at = self._text.find(self._form.end)
        sure = at if at >= 0 else len(self._text) - overlap(self._text, self._form.end)
        told = self._text[: max(len(self._text[:sure].rstrip()), sure - SPACE_CHARS_MAX)]
        self._text = self._text[len(told) :]
        found = [ThoughtPiece(told, is_thought=True)] if told else []
        if at >= 0:
            rest, self._text = self._text[at - len(told) + len(self._form.end) :], ""
            self.is_thinking, self._skips_space = False, True
            found += self._content(ThoughtPiece(rest))
        return found

    def _content(self, piece: ThoughtPiece) -> list[ThoughtPiece]:
        """Return a piece of the content, which begins with no white space behind thinking."""
        if self._skips_space and piece.is_shown:
            piece = ThoughtPiece(piece.text.lstrip())
            self._skips_space = not piece.text
        return [piece] if piece.text else []
