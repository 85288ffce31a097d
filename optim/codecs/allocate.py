"""L-GreCo's dynamic program (arXiv 2210.17357), in its dual form: the least error within a number of bytes.

The paper looks for the fewest bytes under a bound on the error. Here the size of a message is agreed beforehand, so the
bytes are the bound. Each part has several choices, with their bytes and squared error; the program goes over (part,
bytes spent).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

STEPS: Final = 4096  # the bytes above the smallest choices are spent in at most so many steps


class Choice(NamedTuple):
    """One way to code a part. `error`: squared L2 distance between decoded and encoded values."""

    size_bytes: int
    error: float


def allocate(tables: Sequence[Sequence[Choice]], budget: int) -> list[int]:
    """Return the number of one choice for each part: the least sum of errors in at most `budget` bytes; of equal ones
    the smaller. ValueError if even the smallest choices exceed it.

    If more than `STEPS` bytes can be chosen about, sizes are rounded up to a step: the budget always holds, and a
    choice within one step a part of it may be missed."""
    smallest = [min(choice.size_bytes for choice in table) for table in tables]
    spare = budget - sum(smallest)
    if spare < 0:
        raise ValueError(f"the smallest choices take {sum(smallest)} bytes: allow that many instead of {budget}")
    step = max(1, -(-spare // STEPS))
    units = spare // step
    least = np.zeros(units + 1)  # least[e]: error of the parts so far in at most e steps
    picks: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for table, floor in zip(tables, smallest, strict=True):
        best, pick = np.full(units + 1, np.inf), np.zeros(units + 1, dtype=np.int64)
        for number in sorted(range(len(table)), key=lambda i: table[i].size_bytes):
            extra = -(-(table[number].size_bytes - floor) // step)
            if extra > units:
                continue
            with_it = least[: units + 1 - extra] + table[number].error
            better = with_it < best[extra:]
            best[extra:][better], pick[extra:][better] = with_it[better], number
        picks.append(pick)
        least = best
    chosen, left = [], units
    for table, floor, pick in zip(reversed(tables), reversed(smallest), reversed(picks), strict=True):
        number = int(pick[left])
        chosen.append(number)
        left -= -(-(table[number].size_bytes - floor) // step)
    return chosen[::-1]
