"""L-GreCo (arXiv 2210.17357): for each layer its own rank, k or number of bits, under one budget of error.

Layers differ in how much compression hurts them. Given for each layer the choices there are, with the bytes each takes
and the squared error it makes, dynamic programming over (layer, error spent) finds the choice of fewest bytes whose
errors sum to no more than the budget. The usual budget is the error of one choice used everywhere: the result is then
as small or smaller, at no more error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from peer.errors import ConfigError

STEPS: Final = 10_000  # the budget is spent in steps of 1/10,000


@dataclass(frozen=True)
class Choice:
    """One way to code one layer. `error`: squared L2 distance of what is decoded from what was encoded."""

    name: str
    size_bytes: int
    error: float


def allocate(tables: Sequence[Sequence[Choice]], budget: float) -> list[Choice]:
    """One choice for each layer: the fewest bytes with a sum of errors of at most `budget`.

    Errors are rounded up to steps of the budget, so the budget holds exactly, while a choice that would fill it to
    within a step for each layer may be missed. `ConfigError` if even the most exact choices exceed it.
    """
    # cost[e]: fewest bytes of the layers so far with error of at most e steps
    cost = np.zeros(STEPS + 1)
    picks: list[np.ndarray] = []
    for table in tables:
        best, pick = np.full(STEPS + 1, np.inf), np.zeros(STEPS + 1, dtype=np.int64)
        for number, choice in enumerate(table):
            spent = _steps(choice.error, budget)
            if spent > STEPS:
                continue
            with_it = np.full(STEPS + 1, np.inf)
            with_it[spent:] = cost[: STEPS + 1 - spent] + choice.size_bytes
            better = with_it < best
            best[better], pick[better] = with_it[better], number
        picks.append(pick)
        cost = best
    if not np.isfinite(cost[STEPS]):
        raise ConfigError("no choice of codecs stays within the error budget: raise it, or offer a finer codec.")
    chosen: list[Choice] = []
    left = STEPS
    for table, pick in zip(reversed(tables), reversed(picks), strict=True):
        choice = table[int(pick[left])]
        chosen.append(choice)
        left -= _steps(choice.error, budget)
    return chosen[::-1]


def _steps(error: float, budget: float) -> int:
    if error <= 0:
        return 0
    return int(min(np.ceil(error / budget * STEPS), STEPS + 1)) if budget > 0 else STEPS + 1
