"""The inner learning rate, in a module without torch so that a monitor can use it."""

from __future__ import annotations

import math

from peer.config import InnerConfig


def learning_rate(config: InnerConfig, step: int) -> float:
    """Return the rate of the run's inner step `step` (from 0): linear warm-up, then cosine or constant."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    floor = config.min_lr_share
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))
