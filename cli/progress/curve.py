"""A loss as it falls: a bounded number of points, and a line of block characters that shows them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

POINTS_MAX: Final = 64
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


class LossCurve:
    """The values of a whole session in at most `POINTS_MAX` points.

    Once that many are there, pairs become their means, and each later point stands for twice as many values.
    """

    def __init__(self) -> None:
        self._points: list[float] = []
        self._open: list[float] = []
        self._each = 1

    def add(self, value: float | None) -> None:
        """Take in the next value; none that is no number."""
        if value is None or not math.isfinite(value):
            return
        self._open.append(value)
        if len(self._open) < self._each:
            return
        self._points.append(_mean(self._open))
        self._open.clear()
        if len(self._points) >= POINTS_MAX:
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]
            self._each *= 2

    def drawn(self, width: int) -> str:
        """Return the curve in `width` characters at most; empty for fewer than two points."""
        points = _narrowed([*self._points, *([_mean(self._open)] if self._open else [])], width)
        if len(points) < 2:
            return ""
        least, most = min(points), max(points)
        span = (most - least) or 1.0
        steps = len(_BLOCKS) - 1
        return "".join(_BLOCKS[min(steps, int((point - least) / span * steps + 0.5))] for point in points)


def _narrowed(points: list[float], width: int) -> list[float]:
    if len(points) <= width or width < 1:
        return points[:width] if width < 1 else points
    edges = [round(at * len(points) / width) for at in range(width + 1)]
    return [_mean(points[first:end]) for first, end in pairwise(edges)]


def _mean(values: list[float]) -> float:
    return math.fsum(value / len(values) for value in values)
