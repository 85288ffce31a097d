"""Text by strangers, made harmless at the sink: of bounded length that a terminal only shows, or ASCII JSON."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any, Final

SENTENCE_MAX: Final = 300
"""Characters of one foreign sentence on a terminal or in a log."""
LISTED_MAX: Final = 1024
"""Elements of a list in a log."""
_GAP: Final = " ... "
_MARKS_MAX: Final = 3  # on one letter; living languages need no more
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # printable by rule, invisible in fact


def cut(text: str, most: int = SENTENCE_MAX) -> str:
    """Return at most `most` characters of a text: its begin and its end, which holds the remedy of an error."""
    if len(text) <= most:
        return text
    end = (most - len(_GAP)) // 2
    return text[: most - len(_GAP) - end] + _GAP + text[-end:]


def plain(text: str, most: int = SENTENCE_MAX) -> str:
    """Return `text`, cut, as one line that a terminal only shows.

    Controls (also of C1), line and paragraph breaks, marks that turn the direction of writing, invisible characters and
    lone surrogates become "?". A letter keeps three combining marks.
    """
    text = cut(text, most)
    if text.isascii() and text.isprintable():
        return text
    shown, marks = [], 0
    for letter in text:
        marks = marks + 1 if unicodedata.category(letter) in ("Mn", "Me") else 0
        if marks <= _MARKS_MAX:
            shown.append(letter if letter.isprintable() and letter not in _BLANK else "?")
    return "".join(shown)


def json_line(value: Any, most: int | None = SENTENCE_MAX) -> str:
    """Return a value of built-in types as one line of JSON in printable ASCII.

    Strings are cut to `most` characters, lists to `LISTED_MAX` elements; where `most` is None nothing is. NaN and
    infinity become null.
    """
    return json.dumps(_bounded(value, most), allow_nan=False, separators=(",", ":"))


def _bounded(value: Any, most: int | None) -> Any:
    if isinstance(value, str):
        whole = value if most is None else cut(value, most)
        return whole if whole.isascii() else whole.encode("utf-8", "replace").decode()  # JSON has no lone surrogates
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_bounded(str(key), most): _bounded(inner, most) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(inner, most) for inner in (value if most is None else value[:LISTED_MAX])]
    return value
