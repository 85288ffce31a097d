"""The tokens that a session yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DrawnToken:
    """A token that came out."""

    position: int
    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
