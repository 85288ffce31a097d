"""Calls in Python's form, `[f(a=1), g(b="x")]`: names, and values as literals. Nothing is evaluated."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from swarm.gateway.json_depth import DEPTH_MAX

_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,63}")
_NUMBER: Final = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]{0,63})(?:\.[0-9]{0,64})?|\.[0-9]{1,64})(?:[eE][+-]?[0-9]{1,3})?")
_PLAIN: Final = re.compile(r"[^\\\"']+")
_CODE: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_OCTAL: Final = re.compile("[0-7]{1,3}")
_CODED: Final = "xuUN"
"""Letters of which a code follows; of \\N a name, which is not taken."""
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_WORDS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSES: Final = {"[": "]", "(": ")", "{": "}"}
_INTEGER_MAX: Final = 1 << 64


def read_python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and arguments of each call in a list. Raises ValueError."""
    return _Reader(text).calls()


class _Reader:
    """Reads a text from its start to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        self._take("[")
        found = [self._call()]
        while self._more("]"):
            found.append(self._call())
        self._spaced()
        if self._at != len(self._text):
            raise ValueError("something follows the list")
        return found

    def _call(self) -> tuple[str, dict[str, Any]]:
        name, arguments = self._name(), dict[str, Any]()
        self._take("(")
        if self._next() == ")":
            self._at += 1
            return name, arguments
        while True:
            key = self._name()
            self._take("=")
            if key in arguments:
                raise ValueError(f"{key} comes twice")
            arguments[key] = self._value(2)
            if not self._more(")"):
                return name, arguments

    def _value(self, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError("it is nested too deeply")
        sign = self._next()
        if sign in ('"', "'"):
            return self._string()
        if sign == "{":
            return self._object(depth)
        if sign in ("[", "("):
            return self._list(depth)
        if found := _NUMBER.match(self._text, self._at):
            self._at = found.end()
            return _number(found[0])
        word = self._name()
        if word not in _WORDS:
            raise ValueError(f"{word} is no literal")
        return _WORDS[word]

    def _list(self, depth: int) -> list[Any]:
        end = _CLOSES[self._next()]
        self._at += 1
        found = list[Any]()
        while self._next() != end:
            found.append(self._value(depth + 1))
            if not self._more(end):
                return found
        self._at += 1
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        self._at += 1
        found = dict[str, Any]()
        while self._next() != "}":
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            self._take(":")
            found[key] = self._value(depth + 1)
            if not self._more("}"):
                return found
        self._at += 1
        return found

    def _string(self) -> str:
        quote, pieces = self._text[self._at], list[str]()
        self._at += 1
        while (sign := self._text[self._at : self._at + 1]) != quote:
            if not sign:
                raise ValueError("a text has no end")
            if sign == "\\":
                pieces.append(self._escaped())
            elif found := _PLAIN.match(self._text, self._at):
                self._at = found.end()
                pieces.append(found[0])
            else:  # the other quote
                self._at += 1
                pieces.append(sign)
        self._at += 1
        return "".join(pieces)

    def _escaped(self) -> str:
        code = _CODE.match(self._text, self._at + 1)
        if code:
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise ValueError("a letter does not exist")
            return chr(number)
        if octal := _OCTAL.match(self._text, self._at + 1):
            self._at = octal.end()
            return chr(int(octal[0], 8))
        sign = self._text[self._at + 1 : self._at + 2]
        if sign in _CODED:
            raise ValueError("a letter has no code")
        self._at += 2
        return _ESCAPES.get(sign, sign if sign in "\\\"'" else f"\\{sign}")

    # -- signs -------------------------------------------------------------------------------------------------------

    def _more(self, end: str) -> bool:
        """Pass a comma, and return True; or the end, also behind a last comma, and return False."""
        sign = self._next()
        if sign == ",":
            self._at += 1
            if self._next() != end:
                return True
            sign = end
        if sign != end:
            raise ValueError(f"{end} is missing")
        self._at += 1
        return False

    def _name(self) -> str:
        self._spaced()
        found = _NAME.match(self._text, self._at)
        if not found:
            raise ValueError("a name is missing")
        self._at = found.end()
        return found[0]

    def _take(self, sign: str) -> None:
        if self._next() != sign:
            raise ValueError(f"{sign} is missing")
        self._at += 1

    def _next(self) -> str:
        """Return the next sign behind white space; "" at the end."""
        self._spaced()
        return self._text[self._at : self._at + 1]

    def _spaced(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found
        self._at = found.end()


def _number(text: str) -> int | float:
    if set(text) & set(".eE"):
        found = float(text)
        if not math.isfinite(found):
            raise ValueError(f"{text[:20]} is too large")
        return found
    number = int(text)
    if abs(number) >= _INTEGER_MAX >> 1:
        raise ValueError(f"{text[:20]} is too large")
    return number
