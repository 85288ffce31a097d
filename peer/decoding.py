"""Errors of decoding bytes from outside. Apart from `peer.errors`, so that `peer --help` need not load msgspec."""

from __future__ import annotations

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises: for wrong types, invalid UTF-8, and arrays nested too deeply."""
TOLD_CHARS_MAX: Final = 300


def told(error: Exception) -> str:
    """Return an error's text, cut: msgspec quotes a word that it does not know, however long a peer made it."""
    return str(error)[:TOLD_CHARS_MAX]
