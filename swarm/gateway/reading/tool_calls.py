"""Calls of functions in an answer, found piece by piece. Pieces of any size give the same calls and the same text.

A call in a form that is JSON is told as it comes, from the moment when its arguments have begun, and stays a call
however it ends. Other calls are told once they are whole. What only looks like a call is text, as the model wrote it.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import Final

from swarm.gateway.reading.call_formats import CallFormat, Extent, Schemas
from swarm.gateway.reading.json_text import CALL_CHARS_MAX, SPACE_CHARS_MAX, End, ObjectText, passed_members
from swarm.inference.decoding import overlap

CALLS_MAX: Final = 128
"""Of one answer; what follows is text."""
_FAILURES_MAX: Final = 16
"""Of what looks like a call, in one answer; what follows is text. Each is read again for calls inside."""
_ID_LETTERS: Final = 24
_ALPHABET: Final = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call of a function. The pieces of one call come in a row."""

    id: str
    name: str
    arguments: str
    """The next letters of a JSON object, as the model wrote it."""
    is_first: bool = True
    """Whether it begins the call."""
    end: End | None = "completed"
    """In the last piece, how the call ends: `incomplete` without the brace of its arguments."""


@dataclass(frozen=True)
class FoundPart:
    """What a piece has made certain: thinking, then text, then calls."""

    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    thought: str = ""


@dataclass
class _Begun:
    """A call that may have begun."""

    at: int
    """Where in the text that is not told yet; before it is white space."""
    mark: int
    """The length of its mark; 0 for a call without one."""
    extent: Extent | None = None
    body: int = 0
    """Where its text begins, behind the mark, once there is an extent."""
    is_listed: bool = False
    """Whether it follows another one in a list."""


@dataclass
class _Opened:
    """A call whose arguments have begun."""

    id: str
    name: str
    arguments: ObjectText
    around: str
    """The brackets that are open around the arguments."""
    is_first: bool = True
    """Whether no piece was told."""


class CallStream:
    """Finds the calls in one answer."""

    def __init__(
        self, form: CallFormat, schemas: Schemas, is_parallel: bool = True, is_exclusive: bool = False
    ) -> None:
        """`schemas`: of the functions that were offered. `is_parallel`: whether there may be several calls.
        `is_exclusive`: whether there are none after text."""
        self.count = 0
        """How many calls there were."""
        self._form, self._schemas, self._is_parallel = form, schemas, is_parallel
        self._is_exclusive = is_exclusive
        self._signs = frozenset((*form.marks, *form.inner, *form.closes))
        self._text = ""  # what is not told yet
        self._begun: _Begun | None = None
        self._opened: _Opened | None = None
        self._around = ""  # brackets that are open behind a call's arguments
        self._is_bare = True  # whether no text was told since the beginning, or since a call
        self._close_is_due = False  # whether what closes that call may come
        self._failures = 0

    @property
    def is_done(self) -> bool:
        """Whether no more calls are wanted: the answer may end."""
        return self.count > 0 and not self._is_parallel and self._opened is None

    def push(self, text: str, is_shown: bool = True) -> list[FoundPart]:
        """Add a piece; return what is now certain, in order. `is_shown`: False for a hidden special token. Such a token
        counts only if it is a sign of the form; where it belongs to no call it is text."""
        if is_shown or text.strip() in self._signs:
            self._text += text
        return self._certain(whole=False)

    def finish(self) -> list[FoundPart]:
        """Return what was held back."""
        return self._certain(whole=True)

    def _certain(self, whole: bool) -> list[FoundPart]:
        found = list[FoundPart]()
        while not self.is_done:
            told = self._step(whole)
            if told is None:
                break
            if told.text or told.calls:
                found.append(told)
        return found

    def _step(self, whole: bool) -> FoundPart | None:
        """Take the next part of the text; return None if that needs more."""
        if self._opened is not None:
            return self._arguments_step(self._opened, whole)
        if self._around:
            return self._around_step(whole)
        return self._text_step(whole) if self._begun is None else self._call_step(self._begun, whole)

    # -- text ---------------------------------------------------------------------------------------------------------

    def _text_step(self, whole: bool) -> FoundPart | None:
        """Tell text before a call; return None if that needs more."""
        if not self._text or (self._close_is_due and not self._passed_close(whole)):
            return None
        if self._failures >= _FAILURES_MAX or self.count >= CALLS_MAX:
            return self._told(len(self._text)) if self._text else None
        if (begun := self._found()) is not None:
            before = self._before(begun.at)
            self._begun = begun
            begun.at -= before
            return self._told(before)
        if whole:
            if self.count and self._is_bare and len(self._text) <= SPACE_CHARS_MAX and not self._text.strip():
                self._drop(len(self._text))
            return self._told(len(self._text)) if self._text else None
        sure = len(self._text) - max(overlap(self._text, mark) for mark in (*self._form.marks, self._form.opening))
        before = self._before(sure)
        return self._told(before) if before else None

    def _before(self, end: int) -> int:
        """Return how much of the text up to there is told, without the white space at its end."""
        return max(len(self._text[:end].rstrip()), end - SPACE_CHARS_MAX)

    def _found(self) -> _Begun | None:
        """Return the first call that may begin in the text."""
        places = [(found, -len(mark)) for mark in self._form.marks if (found := self._text.find(mark)) >= 0]
        if self._form.opening and (found := self._text.find(self._form.opening)) >= 0:
            places.append((found, 0))
        if self._is_bare and self._form.bare:
            rest = self._text.lstrip()
            space = len(self._text) - len(rest)
            if space <= SPACE_CHARS_MAX and rest and rest[0] in self._form.bare:
                places.append((space, 0))
        if not places:
            return None
        at, size = min(places)
        if self._is_exclusive and (not self._is_bare or self._text[:at].strip()):
            return None
        return _Begun(at, -size)

    def _passed_close(self, whole: bool) -> bool:
        """Pass what closes a call, or stands between two; return False if more is needed."""
        form, rest = self._form, self._text.lstrip()
        if len(self._text) - len(rest) > SPACE_CHARS_MAX:
            self._close_is_due = False
            return True
        for close in form.closes:
            if not whole and rest != close and close.startswith(rest):
                return False
            if rest.startswith(close):
                self._drop(len(self._text) - len(rest) + len(close))
        if form.separators:
            if not rest and not whole:
                return False
            if rest and rest[0] in form.separators:
                next_ = rest[1:].lstrip()
                is_near = len(rest) - len(next_) <= SPACE_CHARS_MAX
                if is_near and not whole and any(mark.startswith(next_) and mark != next_ for mark in form.marks):
                    return False
                if is_near and next_ and (next_[0] in form.bare or next_.startswith(form.marks)):
                    self._drop(len(self._text) - len(next_))
        self._close_is_due = False
        return True

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call_step(self, begun: _Begun, whole: bool) -> FoundPart | None:
        """Read a call; return None if that needs more."""
        try:
            extent = self._extent(begun)
            if extent is not None and self._is_opened(begun):
                return FoundPart()
            end = None if extent is None else extent.end(self._text)
        except ValueError:
            return self._no_call(begun)
        size = len(self._text) if end is None else end
        if size > CALL_CHARS_MAX or (end is None and whole):
            return self._no_call(begun)
        if end is None:
            return None
        calls = self._form.calls(self._text[begun.body : end], self._schemas)
        if not calls or self.count + len(calls) > CALLS_MAX:
            return self._no_call(begun)
        self._drop(end)
        self._begun = None
        self._around = "[" if begun.is_listed else ""
        self._is_bare = self._close_is_due = True
        wanted = calls if self._is_parallel else calls[:1]
        self.count += len(wanted)
        return FoundPart(calls=tuple(CallPiece(_new_id(), name, arguments) for name, arguments in wanted))

    def _extent(self, begun: _Begun) -> Extent | None:
        """Return the extent of a call, None if more is needed. Raises ValueError if it is none."""
        if begun.extent is None:
            behind = self._text[begun.at + begun.mark :]
            begun.body = len(self._text) - len(behind.lstrip())
            if begun.body - begun.at - begun.mark > SPACE_CHARS_MAX:
                raise ValueError("too much white space follows the mark")
            begun.extent = self._form.extent(self._text, begun.body)
        return begun.extent

    def _is_opened(self, begun: _Begun) -> bool:
        """Whether the arguments of a call have begun: from here on it is one, whatever follows."""
        opened = self._form.opened(self._text, begun.body)
        if opened is None or opened.name not in self._schemas:
            return False
        self._drop(opened.at)
        self._begun = None
        around = ("[" if begun.is_listed else "") + opened.around
        self._opened = _Opened(_new_id(), opened.name, ObjectText(self._form.ends), around)
        self.count += 1
        return True

    def _arguments_step(self, opened: _Opened, whole: bool) -> FoundPart | None:
        """Tell arguments as they come; return None if that needs more."""
        size, end = opened.arguments.take(self._text, whole)
        if not size and end is None:
            return None
        piece = CallPiece(opened.id, opened.name, self._text[:size], opened.is_first, end)
        self._drop(size)
        opened.is_first = False
        if end is not None:
            self._opened = None
            self._around = opened.around if end == "completed" else ""
            # what follows arguments that are too deep or too long is no call beside them
            self._is_bare = self._close_is_due = end == "completed" or opened.arguments.is_at_mark
        return FoundPart(calls=(piece,))

    def _around_step(self, whole: bool) -> FoundPart | None:
        """Pass what stands around the arguments of a call, or between the calls of a list; return None if that needs
        more. What does not belong there is text behind the call."""
        if self._around.endswith("{"):
            passed = passed_members(self._text, whole)
            if passed is None:
                return None
            self._drop(passed)
            self._around = self._around[:-1]
            return FoundPart()
        rest = self._text.lstrip()
        space = len(self._text) - len(rest)
        if not rest and not whole and space <= SPACE_CHARS_MAX:
            return None
        is_near, sign = space <= SPACE_CHARS_MAX, rest[:1]
        if is_near and sign == ",":
            next_ = rest[1:].lstrip()
            is_near = len(rest) - len(next_) <= SPACE_CHARS_MAX
            if not next_ and not whole and is_near:
                return None
            if is_near and next_[:1] == "{" and self.count < CALLS_MAX:
                self._drop(len(self._text) - len(next_))
                self._begun = _Begun(0, 0, is_listed=True)
                self._close_is_due = False
        elif is_near and sign == "]":
            self._drop(space + 1)
        self._around = ""
        return FoundPart()

    def _no_call(self, begun: _Begun) -> FoundPart:
        """Tell the mark as text. Behind it another call may begin."""
        self._begun = None
        self._failures += 1
        return self._told(begun.at + max(begun.mark, 1))

    # -- the text that is not told yet --------------------------------------------------------------------------------

    def _told(self, size: int) -> FoundPart:
        """Take so many letters from the text, and return them."""
        text = self._text[:size]
        self._drop(size)
        if text:
            self._is_bare = False
        return FoundPart(text)

    def _drop(self, size: int) -> None:
        self._text = self._text[size:]


def _new_id() -> str:
    """Return the id of a call, as OpenAI's look."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LETTERS))
