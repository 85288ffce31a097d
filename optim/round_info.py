"""Where a run stands when a round begins. By itself, so that who only looks on need not load torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundInfo:
    """Which round this is: `round` counts the commits, itself included; `step` is the run's position in the inner
    schedule before it, `lr` the inner learning rate there."""

    round: int
    step: int
    lr: float
