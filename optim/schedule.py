"""The position of a round in the run, and how many inner steps a round has. Loads no torch: clients read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from peer.errors import ConfigError


@dataclass(frozen=True)
class RoundInfo:
    """The position of one round in the run."""

    round: int
    """The number of commits, this round's included."""
    step: int
    """The position in the inner schedule before the round."""
    lr: float
    """The inner learning rate at that position."""


def quadratic_steps(base: int, alpha: float, lr: float) -> int:
    """Return H = max(base, floor((alpha / lr)^2)), the Quadratic Synchronization Rule (arXiv 2310.14423).

    `lr`: the inner learning rate at the round's start. Rounds grow as it falls."""
    if lr <= 0:
        raise ConfigError(f"the inner learning rate is {lr}, and the quadratic rule divides by it: set min_lr_share")
    return max(base, math.floor((alpha / lr) ** 2))
