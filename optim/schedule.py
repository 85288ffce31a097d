"""How many inner steps a round has."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peer.errors import ConfigError


def quadratic_steps(base: int, alpha: float, lr: float) -> int:
    """The Quadratic Synchronization Rule (arXiv 2310.14423): H = max(base, floor((alpha / lr)^2)), with the inner
    learning rate of the round's start. Rounds grow as the rate falls."""
    if lr <= 0:
        raise ConfigError(f"the inner learning rate is {lr}: the quadratic rule needs it above 0 (set min_lr_share).")
    return max(base, math.floor((alpha / lr) ** 2))


def steps_by_speed(base: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Dynamic local updates (DyLU, arXiv 2401.09135): floor(speed / fastest * base) each, but at least 1, so that all
    finish together. `speeds`: inner steps a second, above 0."""
    if not speeds or min(speeds) <= 0:
        raise ConfigError("speeds must all be above 0: measure each peer first.")
    fastest = max(speeds)
    return tuple(max(1, math.floor(speed / fastest * base)) for speed in speeds)
