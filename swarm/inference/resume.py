"""Resuming a session after a revision: which server forgets, resends, or is fed, and from which position. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GAPS_MAX: Final = 3
"""So many gaps in a row are filled by replays; then all is computed again."""


@dataclass(frozen=True)
class Resumption:
    """Instructions to the servers of a route, numbered in order."""

    rewinds: dict[int, int]
    """The position at and behind which a server forgets."""
    replays: dict[int, int]
    """The position from which a server sends its outputs again, to the next one; for each but the last."""
    feed: int | None
    """The position from which the client sends tokens to the first server; None: it has them all."""


def resume(haves: Sequence[int], known: int, fresh: Sequence[bool], gaps: int, row: int | None = None) -> Resumption:
    """`haves`: the positions that each server has. `known`: those of the client. `row`: the first position whose output
    the client needs from the last server; None: the last one that it knows. `fresh`: which servers are new to the
    session, have lost their flow with the client, or have drawn no token for long. `gaps`: how many came in a row."""
    have, rewinds = list(haves), dict[int, int]()
    needed = known - 1 if row is None else row
    if all(fresh) or gaps >= GAPS_MAX:
        # Their prefixes may differ, and what one has computed before it was asked it has not kept to send.
        at = 0 if gaps >= GAPS_MAX else min(*have, needed)
        rewinds = {number: at for number, position in enumerate(have) if position > at}
        have = [at] * len(have)
    elif fresh[-1] and have[-1] > needed:
        rewinds[len(have) - 1] = have[-1] = needed  # what it sent may have been lost with its flow
    replays = {number: have[number + 1] for number in range(len(have) - 1)}
    return Resumption(rewinds, replays, have[0] if have[0] < known else None)
