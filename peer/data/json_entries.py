"""Where the values of a JSON text begin and end, whatever its form: one a line, in an array, or over several lines.

Brackets and strings are counted, nothing is decoded. So an array of a gigabyte costs the memory of its longest object.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Final

from peer.data.packed_files import NoText

# Each group repeats a bounded number of times: the engine keeps a state for each repetition.
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*){0,100}"'
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,1000}', re.DOTALL)
_BRACKET: Final = re.compile(rb'(?:[^"{}\[\]]+|' + _STRING + rb'){0,100}(["{}\[\]]?)', re.DOTALL)
_BETWEEN: Final = re.compile(rb'[\s,]*(["{}\[\]]|[^\s,"{}\[\]]+|$)')
_CONSTANT: Final = re.compile(rb'(?:[^"NI]+|' + _STRING + rb'){0,100}("?)(NaN|Infinity|[NI])?', re.DOTALL)
_DEPTH_MAX: Final = 1000  # decoders give up near it


def lines(
    pieces: Iterator[bytes], is_cut: Callable[[], bool], value_bytes_max: int = sys.maxsize
) -> Iterator[bytes | bytearray]:
    """Yield each line, without its end. `is_cut`: whether the pieces end before the text does; the last line is then
    left out. Raises NoText for a line longer than `value_bytes_max`."""
    line = bytearray()
    for piece in pieces:
        *ended, rest = piece.split(b"\n")
        if ended:
            line += ended[0]
            yield line
            line = bytearray()
            yield from ended[1:]
        line += rest
        check_value(len(line), value_bytes_max)
    if line and not is_cut():
        yield line


def entries(
    pieces: Iterator[bytes], is_cut: Callable[[], bool], value_bytes_max: int = sys.maxsize
) -> Iterator[bytes | bytearray]:
    """Yield each outermost value, and in place of an outermost array each of its elements. Only objects are whole: an
    array in an array is represented by its beginning, and a string by its quotes. An object that does not end is left
    out if the pieces end before the text does. Raises NoText for one longer than `value_bytes_max`."""
    scanner = _Scanner()
    for piece in pieces:
        yield from scanner.entries(piece)
        check_value(len(scanner.object), value_bytes_max)
    if scanner.is_open and not is_cut():
        yield scanner.object


def check_value(size_bytes: int, value_bytes_max: int) -> None:
    """Raise NoText for a value of too many bytes: it is held in memory whole."""
    if size_bytes > value_bytes_max:
        raise NoText(f"JSON with a value of more than {value_bytes_max >> 20} MiB")


class _Scanner:
    """The place in a JSON text between two pieces of it."""

    def __init__(self) -> None:
        self.object = bytearray()
        """The bytes so far of the open object."""
        self.is_open = False
        self._depth = 0
        self._level = 0
        """The depth at which an entry begins: 1 in an outermost array."""
        self._in_string = False
        self._in_scalar = False
        self._escaped = False

    def entries(self, piece: bytes) -> Iterator[bytes | bytearray]:
        """Yield the entries that end in the next piece. Raises NoText for what is nested too deeply."""
        at = start = 0
        while at < len(piece):
            if self._in_string:
                at, is_ended = self._pass_string(piece, at)
                if is_ended and self._is_between:
                    yield b'""'
                continue
            is_between = self._is_between
            found = (_BETWEEN if is_between else _BRACKET).match(piece, at)
            assert found is not None  # both match nothing, too
            at, token = found.end(), found.group(1)
            if token == b'"':
                self._in_string = True
            elif token == b"{":
                if is_between:
                    self.is_open, start = True, found.start(1)
                self._deepen()
            elif token == b"[":
                if is_between and self._depth:
                    yield b"[]"
                elif is_between:
                    self._level = 1
                self._deepen()
            elif token in (b"}", b"]"):
                self._depth = max(0, self._depth - 1)
                if self.is_open and self._depth == self._level:
                    yield self.object + piece[start:at]
                    self.object, self.is_open = bytearray(), False
                elif not self._depth:
                    self._level = 0
            elif token and not (self._in_scalar and found.start(1) == 0):
                yield b"0"
            self._in_scalar = is_between and at == len(piece) and token not in (b"", b'"', b"{", b"[", b"}", b"]")
        if self.is_open:
            self.object += piece[start:]

    @property
    def _is_between(self) -> bool:
        """Whether an entry may begin."""
        return not self.is_open and self._depth == self._level

    def _deepen(self) -> None:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise NoText("JSON nested too deeply")

    def _pass_string(self, piece: bytes, at: int) -> tuple[int, bool]:
        """Return where the piece continues after the string, or its end if the string continues; and which."""
        at += self._escaped
        self._escaped = False
        while at < len(piece):
            at = _end(_REST_OF_STRING, piece, at)
            if piece[at : at + 1] == b'"':
                self._in_string = False
                return at + 1, True
            self._escaped = at + 1 == len(piece)
            at += self._escaped
        return at, False


def constants(value: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of each NaN and infinity of a value, with its sign."""
    at = 0
    while at < len(value):
        found = _CONSTANT.match(value, at)
        assert found is not None  # it matches nothing, too
        at = found.end()
        if found.group(1):
            at = _after_string(value, found.end(1))
        elif found.group(2) in (b"NaN", b"Infinity"):
            start = found.start(2)
            yield start - (start > 0 and value[start - 1 : start] == b"-"), at


def _after_string(value: bytes | bytearray, at: int) -> int:
    while at < len(value):
        at = _end(_REST_OF_STRING, value, at)
        if value[at : at + 1] == b'"' or at + 1 == len(value):
            return at + 1
    return at


def _end(pattern: re.Pattern[bytes], text: bytes | bytearray, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()
