"""JSON of calls while a model still writes it: where a call's arguments begin and end, in a time linear in the text.

Nothing is parsed here. A model may write no valid JSON, or be cut: the arguments of a call that has begun are what it
wrote.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from swarm.gateway.json_depth import DEPTH_MAX

CALL_CHARS_MAX: Final = 1 << 20
"""Of one call, and of its arguments alone."""
SPACE_CHARS_MAX: Final = 256
"""White space around the parts of a call."""
_HEAD_CHARS_MAX: Final = 1024
"""Of a call before its arguments, and of its members after them."""
_SIGNS: Final = re.compile(r"[\[\](){}\"']")
_JSON_SIGNS: Final = re.compile(r"[\[\]{}\"]")
_STRING_SIGNS: Final = re.compile(r'["\\]')
_PAIRS: Final = {"]": "[", "}": "{", ")": "("}

_BLANK: Final = r"[ \t\r\n]{0,64}"
_OTHER: Final = (
    rf'"(?!(?:name|arguments|parameters)")[^"\\\x00-\x1f]{{0,64}}"{_BLANK}:{_BLANK}'
    rf'(?:"[^"\\\x00-\x1f]{{0,64}}"|[a-zA-Z0-9.+-]{{1,32}}){_BLANK},{_BLANK}'
)
_HEAD: Final = re.compile(
    rf'(\[?){_BLANK}\{{{_BLANK}(?:{_OTHER}){{0,4}}"name"{_BLANK}:{_BLANK}"([a-zA-Z0-9_-]{{1,64}})"{_BLANK},{_BLANK}'
    rf'(?:{_OTHER}){{0,4}}"(?:arguments|parameters)"{_BLANK}:{_BLANK}(?=\{{)'
)
"""A call as JSON up to its arguments. Between its members, which a model may write in any order, a few others with
short values are taken. All repetitions are bounded."""
End = Literal["completed", "incomplete"]
"""Whether arguments ended with their own brace."""


class Opened(NamedTuple):
    """A call whose arguments have begun."""

    name: str
    at: int
    """Where its arguments begin, with a brace."""
    around: str
    """The brackets that are open around them, if any: of a list, then of the call's object."""


def opened_json(text: str, at: int) -> Opened | None:
    """Return the call, the first one of a list or one alone, that begins there if its arguments have begun."""
    found = _HEAD.match(text, at, at + _HEAD_CHARS_MAX)
    return Opened(found[2], found.end(), found[1] + "{") if found else None


class Brackets:
    """A text in brackets, from its first one on. A bracket in quotes is a letter."""

    def __init__(self, begin: int, is_python: bool = False, around: str = "") -> None:
        """`around`: brackets that are open before it."""
        self._at = begin
        self._signs = _SIGNS if is_python else _JSON_SIGNS
        self._open = [*around]
        self._quote = ""

    def end(self, text: str) -> int | None:
        """Return where the text ends, None if more is needed. `text`: the same as last time, or longer. Raises
        ValueError if its brackets do not match, or are too many."""
        while True:
            if self._quote:
                if not self._passed_quote(text):
                    return None
                continue
            found = self._signs.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            self._at, sign = found.end(), found[0]
            if sign in "\"'":
                self._quote = sign
            elif sign not in _PAIRS:
                self._open.append(sign)
                if len(self._open) > DEPTH_MAX + 2:
                    raise ValueError("it is nested too deeply")
            elif not self._open or self._open.pop() != _PAIRS[sign]:
                raise ValueError("its brackets do not match")
            elif not self._open:
                return self._at

    def _passed_quote(self, text: str) -> bool:
        """Pass the end of a quoted text; return False if more is needed."""
        while self._at < len(text):
            letter = text[self._at]
            if letter == "\\":
                if self._at + 1 == len(text):
                    return False
                self._at += 2
                continue
            self._at += 1
            if letter == self._quote:
                self._quote = ""
                return True
        return False


class ObjectText:
    """The text of a JSON object that comes in pieces, from its brace on.

    A model that closes too little is forgiven: a bracket closes those inside of it, and one that closes none is a
    letter. So an object with a wrong bracket ends where its call goes on, and not with the answer.
    """

    def __init__(self, marks: tuple[str, ...] = ()) -> None:
        """`marks`: texts that end it early, outside of strings."""
        self.is_at_mark = False
        """Whether it has ended at one of them."""
        firsts = "".join(re.escape(mark[0]) for mark in marks)
        self._marks, self._signs = marks, re.compile(rf'[\[\]{{}}"{firsts}]')
        self._open: list[str] = []
        self._is_string = self._is_escaped = False
        self._size = 0

    def take(self, text: str, is_last: bool) -> tuple[int, End | None]:
        """Return how many letters of what comes next belong to it, and, once it has ended, how. Letters that are not
        taken come again, with more. `is_last`: whether no more comes."""
        room = CALL_CHARS_MAX - self._size
        at, end = self._taken(text[:room], is_last or len(text) > room)
        self._size += at
        return at, end or ("incomplete" if is_last or self._size >= CALL_CHARS_MAX else None)

    def _taken(self, text: str, is_last: bool) -> tuple[int, End | None]:
        at = 0
        while at < len(text):
            if self._is_string:
                at = self._passed_string(text, at)
                continue
            found = self._signs.search(text, at)
            if found is None:
                break
            at, sign = found.start(), found[0]
            if sign == '"':
                self._is_string = True
            elif sign in "[{":
                if len(self._open) == DEPTH_MAX:
                    return at, "incomplete"
                self._open.append(sign)
            elif sign in _PAIRS:
                self._close(_PAIRS[sign])
                if not self._open:
                    return at + 1, "completed"
            elif text.startswith(self._marks, at):
                self.is_at_mark = True
                return at, "incomplete"
            elif not is_last and any(mark.startswith(text[at : at + len(mark)]) for mark in self._marks):
                return at, None
            at += 1
        return len(text), None

    def _passed_string(self, text: str, at: int) -> int:
        """Go behind the end of the string, or of the text."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = _STRING_SIGNS.search(text, at)
        if found is None:
            return len(text)
        self._is_string, self._is_escaped = found[0] == "\\", found[0] == "\\"
        return found.end()

    def _close(self, bracket: str) -> None:
        """Close the innermost bracket of a kind, and those inside of it."""
        if bracket in self._open:
            while self._open.pop() != bracket:
                pass


def passed_members(text: str, is_last: bool) -> int | None:
    """Return how much of the text behind arguments ends their call: its other members, and its brace, which may be
    missing; None if more is needed. `is_last`: whether no more comes."""
    rest = text.lstrip()
    space = len(text) - len(rest)
    if space > SPACE_CHARS_MAX:
        return 0
    if not rest:
        return 0 if is_last else None
    if rest[0] == "}":
        return space + 1
    if rest[0] != ",":
        return 0
    near = text[:_HEAD_CHARS_MAX]
    is_short = len(text) < _HEAD_CHARS_MAX and not is_last
    if not (member := near[space + 1 :].lstrip()):
        return None if is_short else 0
    if member[0] != '"':  # the next call of a list
        return 0
    try:
        end = Brackets(space, around="{").end(near)
    except ValueError:
        return 0
    return None if end is None and is_short else end or 0
