"""Errors of decoding bytes from outside. Apart from `peer.errors`, so that `peer --help` need not load msgspec."""

from __future__ import annotations

import json
import threading
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

Decoded = TypeVar("Decoded")

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises: for wrong types, invalid UTF-8, and arrays nested too deeply."""
TOLD_CHARS_MAX: Final = 300
_MARK: Final = b"\xef\xbb\xbf"  # editors on Windows put it before UTF-8
_NO_NUMBERS: Final = (b"NaN", b"Infinity")  # no JSON, and written by Python
_LFS: Final = b"version https://git-lfs"
_FIRST: Final = threading.Lock()


@cache
def decoder_of(type_: type[Decoded]) -> msgspec.msgpack.Decoder[Decoded]:
    """Return the decoder of a type. Two threads in which msgspec 0.22 decodes a type for the first time end the
    process (tests/peer/test_decoding.py), so it is made by one at a time."""
    with _FIRST:
        return msgspec.msgpack.Decoder(type_)


def told(error: Exception) -> str:
    """Return an error's text, cut: msgspec quotes a word that it does not know, however long a peer made it."""
    return str(error)[:TOLD_CHARS_MAX]


def decode_json(content: bytes, kind: Any) -> Any:
    """Decode a JSON file as common programs write it: also with a byte-order mark, NaN or Infinity. Raises
    MALFORMED."""
    content = content.removeprefix(_MARK)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not any(word in content for word in _NO_NUMBERS):
            raise
        try:
            loose = json.loads(content)
        except (ValueError, RecursionError):
            loose = None
        if loose is None:
            raise
    return msgspec.convert(loose, type=kind)


def is_pointer(content: bytes) -> bool:
    """Return whether a file begins as Git LFS writes it in place of one that it has not fetched."""
    return content.startswith(_LFS)


def malformed(content: bytes, error: Exception) -> str:
    """Return what is wrong with a JSON file, as the rest of a sentence that begins with its name, and the remedy."""
    if is_pointer(content):
        return "is a pointer of Git LFS and not the file itself: run `git lfs pull` in its folder"
    if isinstance(error, msgspec.ValidationError):
        return f"is malformed ({told(error)}): correct that field"
    return f"is no JSON ({told(error)}): correct it there, or download it again if it was cut short"
