"""The depth of JSON of strangers, as of schemas and of arguments of calls."""

from __future__ import annotations

from typing import Any, Final

DEPTH_MAX: Final = 32
"""Objects and lists in each other, in a function's parameters and in the arguments of a call."""


def is_deep(value: Any) -> bool:
    """Return whether objects and lists lie in each other deeper than `DEPTH_MAX`. Takes a time linear in the size."""
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True
