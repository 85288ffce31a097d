"""Errors of decoding bytes from outside. Apart from `peer.errors`, so that `peer --help` need not load msgspec."""

from __future__ import annotations

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises: for wrong types, invalid UTF-8, and arrays nested too deeply."""
