"""Short texts for terminals: counts, sizes and quoted paths."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Final

NOTHING: Final = "-"  # not applicable, or not known


def several(count: int, what: str) -> str:
    """Return "1 peer", "2 peers" or "3 micro-batches"."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def quoted(path: Path) -> str:
    """Return a path as a person types it in a shell, from whatever folder."""
    return shlex.quote(os.path.abspath(path))


def size_text(size_bytes: float) -> str:
    """Return a size for people: 1536 -> "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size_bytes < 1000 or unit == "TB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")


def duration_text(seconds: float) -> str:
    """Return a time for people: 4.2 -> "4.2 s", 200 -> "3 min", 100 000 -> "1 d 4 h"."""
    if seconds < 10 and not float(seconds).is_integer():
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours = round(minutes / 60)
    if hours < 10:
        return f"{minutes // 60} h {minutes % 60} min"
    if hours < 48:
        return f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours < 240 else f"{hours // 24} d"


def held_out_text(value: float | None, measured: int | None) -> str:
    """Return a held-out loss with the round that it was `measured` in, as another loss beside it is of a later one."""
    of = "" if measured is None or number_text(value) == NOTHING else f" (round {measured})"
    return f"{number_text(value)}{of}"


def number_text(value: float | None) -> str:
    """Return a loss with three digits; "-" where there is none that is a number."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.3f}"
