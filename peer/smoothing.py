"""Exponential smoothing of measurements."""

from __future__ import annotations


def smoothed(old: float | None, new: float, weight: float) -> float:
    """Return `old` moved towards a new measurement by that share of the difference; the measurement itself if it is the
    first one (`old` is None)."""
    return new if old is None else old + weight * (new - old)
