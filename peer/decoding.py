"""What decoding bytes from outside may raise; apart from `peer.errors`, so that `peer --help` need not load msgspec."""

from __future__ import annotations

from typing import Final

import msgspec

MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises: wrong types, text that is no UTF-8, arrays nested without end."""
