"""L-GreCo (arXiv 2210.17357): the number of bits of each part, under one budget of error.

Each part (a layer in the paper, a slice here) has several choices, with their bytes and squared error. Dynamic
programming over (part, error spent) finds the fewest bytes whose errors sum to at most the budget. The usual budget is
the error of one choice everywhere: the result is then no larger, with no more error.
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
    """One way to code a part. `error`: squared L2 distance between decoded and encoded values."""

    name: str
    size_bytes: int
    error: float


def allocate(tables: Sequence[Sequence[Choice]], budget: float) -> list[Choice]:
    """Return one choice for each part: the fewest bytes with a sum of errors of at most `budget`.

    Errors are rounded up to steps of the budget, so the budget always holds; a choice within one step a part of it may
    be missed. `ConfigError` if even the smallest errors exceed it.
    """
    # cost[e]: fewest bytes of the parts so far with error of at most e steps
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
        raise ConfigError(
            f"no choice of codecs stays within the error budget {budget:g}: raise it, or offer a finer codec"
        )
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
