"""The documents of a JSON file: JSON lines, an array of objects, or objects printed over several lines.

The content decides, not the name. A document is a field of an object at the top level, or in the outermost array. Each
object is decoded by itself. All that Python reads is accepted, also NaN, infinity and halves of surrogate pairs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any, Final

import msgspec

from peer.data.conversations import MESSAGES, SHARED, Conversation, FileMessage, encode_conversation, messages_of
from peer.data.json_entries import constants, entries, lines
from peer.decoding import MALFORMED

JSON_SUFFIXES: Final = frozenset({".json", ".jsonl", ".ndjson"})
_HEAD_BYTES: Final = 1 << 20  # the form of a file is decided by so much of it
_NAMELESS_MAX: Final = 100  # objects without the field that are searched for other fields
_HALF_BYTES: Final = 6
_ESCAPE: Final = re.compile(  # a whole pair, a half of one, or anything else
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL
)
_CONTINUED: Final = (b",", b":", b"[", b"{")


class JsonDocuments:
    """The documents of one file, and the count of its other values."""

    def __init__(self, field: str, value_bytes_max: int = sys.maxsize, chat: bool = False) -> None:
        """`chat`: whether the field holds messages, not a text."""
        self.has_field = False
        self.is_replaced = False
        """Whether a half of a surrogate pair became U+FFFD."""
        self._field = field
        self._value_bytes_max = value_bytes_max
        self._by_lines = True
        self._is_chat = chat
        self._whole = _text_decoder(field, Conversation if chat else str)
        self._raw = _raw_decoder(field, SHARED if chat and field == MESSAGES else "")
        self._others: list[tuple[str, bool]] = []
        self._values = 0
        self._objects = 0
        self._textless = 0
        self._empty = 0

    def texts(self, pieces: Iterator[bytes], is_cut: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the documents of a file, UTF-8. `is_cut`: whether the pieces, at their end, are a part of the file; a
        line or an object that does not end in them is then left out."""
        head = bytearray()
        for piece in pieces:
            head += piece
            if len(head) >= _HEAD_BYTES:
                break
        self._by_lines = self._is_by_lines(bytes(head))
        split = lines if self._by_lines else entries
        for value in split(chain((bytes(head),), pieces), is_cut, self._value_bytes_max):
            if not value or value.isspace():
                continue
            self._values += 1
            text = self._text_of(value)
            if text:
                yield text
            elif text is None:
                self._textless += 1
            else:
                self._empty += 1

    def refusal(self, suffix: str) -> str:
        """Return the kind of a file without a document, for the account."""
        if not self.lacks_field:
            return "empty"
        if not self._objects:
            return f"{suffix} without a JSON object"
        form = " of one object" if self._is_lone else ""
        return f"{suffix}{form} without text in field {self._field}"

    def lost(self, suffix: str) -> dict[str, int]:
        """Return the counts of values without a text, by kind, for the account; none of a file that is no JSON."""
        if not self._objects or self._is_lone:
            return {}
        values = f"{'lines' if self._by_lines else 'entries'} of {suffix}"
        counts = {f"{values} without a text": self._textless, f"{values} with an empty text": self._empty}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def lacks_field(self) -> bool:
        """Whether the file has values, and none of them has a text."""
        return bool(self._values) and not self.has_field

    @property
    def other_fields(self) -> list[str]:
        """Fields with text of an object that has no text in the field; of a file that is one object, only a field that
        is most of it: a setting is no document."""
        return [name for name, is_most in self._others if is_most or not self._is_lone]

    @property
    def _is_lone(self) -> bool:
        return not self._by_lines and self._values == 1

    def _text_of(self, value: bytes | bytearray) -> bytes | None:
        """Return the text of an object; None without one, and for any other value."""
        try:
            text = self._whole.decode(value).field
        except MALFORMED:
            return self._text_of_odd(value)
        self._objects += 1
        self.has_field = True
        return _encoded(text)

    def _text_of_odd(self, value: bytes | bytearray) -> bytes | None:
        found, is_replaced = self._object(value)
        if found is None:
            return None
        self._objects += 1
        text = self._decoded(found.field or getattr(found, "shared", b""))
        if text is None:
            if not self._others and self._objects <= _NAMELESS_MAX:
                self._others = _fields_with_text(_mended(value)[0])
            return None
        self.has_field = True
        self.is_replaced |= is_replaced
        return _encoded(text)

    def _decoded(self, raw: bytes) -> str | list[FileMessage] | None:
        """Return the text or the messages in the JSON of a field, None where it holds none."""
        try:
            if not raw:
                return None
            return messages_of(msgspec.json.decode(raw)) if self._is_chat else msgspec.json.decode(raw, type=str)
        except MALFORMED:
            return None

    def _object(self, value: bytes | bytearray) -> tuple[Any, bool]:
        """Return an object with the JSON of its field, None for any other value; and whether a half of a surrogate pair
        was replaced in it."""
        if not value.lstrip().startswith(b"{"):
            return None, False
        try:
            return self._raw.decode(value), False
        except MALFORMED:
            mended, is_replaced = _mended(value)
        try:
            return (self._raw.decode(mended) if mended != value else None), is_replaced
        except MALFORMED:
            return None, False

    def _is_by_lines(self, head: bytes) -> bool:
        """Whether each line of a file that begins so is a value of its own: its first line is a whole object and not
        the only one, or a later line is, where none before it is continued."""
        first, ended, rest = head.lstrip().partition(b"\n")
        while ended and first.strip() == b"{}":  # it stands on one line also where others are printed over several
            first, ended, rest = rest.lstrip().partition(b"\n")
        if not first.startswith((b"{", b"[")):
            return True
        if not ended:
            return first.startswith(b"{") and len(head) >= _HEAD_BYTES
        if self._object(first)[0]:
            return not rest.isspace() and bool(rest)
        before = first.rstrip()
        for line in map(bytes.rstrip, rest.split(b"\n")):
            if line.startswith(b"{") and not before.endswith(_CONTINUED) and self._object(line)[0]:
                return True
            before = line or before
        return False


def _encoded(text: str | list[FileMessage]) -> bytes:
    return text.encode() if isinstance(text, str) else encode_conversation(text)


@cache
def _text_decoder(field: str, kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder of objects whose field of that name, here `field`, is a text or messages; others are passed
    over."""
    return msgspec.json.Decoder(msgspec.defstruct("Object", [("field", kind)], rename={"field": field}))


@cache
def _raw_decoder(field: str, shared: str) -> msgspec.json.Decoder[Any]:
    """Return the same of any objects: `field` is the JSON of its value, empty without the field. So is `shared`, of a
    second field of that name; "" for none."""
    names = {"field": field, "shared": shared} if shared else {"field": field}
    fields = [(name, msgspec.Raw, msgspec.Raw(b"")) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Object", fields, rename=names))


def _mended(value: bytes | bytearray) -> tuple[bytearray, bool]:
    """Return a value with 0 for NaN and infinity, and U+FFFD for each half of a surrogate pair, which msgspec refuses;
    and whether there was such a half. It stays as long as it is."""
    mended, is_replaced = bytearray(value), False
    if b"NaN" in value or b"Infinity" in value:
        for start, stop in constants(value):
            mended[start:stop] = b"0".ljust(stop - start)
    if b"\\ud" in value or b"\\uD" in value:
        for found in _ESCAPE.finditer(value):
            if len(found.group()) == _HALF_BYTES:
                mended[found.start() : found.end()] = b"\\ufffd"
                is_replaced = True
    return mended, is_replaced


def _fields_with_text(value: bytes | bytearray) -> list[tuple[str, bool]]:
    """Return which fields of an object hold a string, and whether that is most of the object."""
    try:
        found = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    except MALFORMED:
        return []
    texts = {name: bytes(text).lstrip() for name, text in found.items()}
    return [(name, 2 * len(text) > len(value)) for name, text in texts.items() if text.startswith(b'"')]
