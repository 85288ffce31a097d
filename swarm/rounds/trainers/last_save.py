"""The last checkpoint of a peer that leaves: while no other peer keeps the state, a full disk is waited for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import ceil
from pathlib import Path
from typing import Final

import trio

from peer.catalogue.machine import StateAtRisk
from peer.events import EventLog

LAST_SAVE_S: Final = 300.0
"""How long the last holder of a state waits for room on its disk."""
_LAST_PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)


async def save_or_wait(
    save: Callable[[], Awaitable[bool]],
    held_elsewhere: Callable[[], bool],
    round: int,
    folder: Path,
    events: EventLog,
) -> bool:
    """Call `save()` until it has written the state of `round` or another peer keeps it. Return false where neither has
    happened after `LAST_SAVE_S`. Event `state_at_risk` before each pause."""
    until, tries = trio.current_time() + LAST_SAVE_S, 0
    while not await save() and not held_elsewhere():
        left_s = until - trio.current_time()
        if left_s <= 0:
            return False
        reason = f"no other peer keeps the state of round {round}: free some space under {folder}"
        events.emit(StateAtRisk(round=round, seconds_left=ceil(left_s), reason=reason))
        await trio.sleep(min(left_s, _LAST_PAUSES_S[min(tries, len(_LAST_PAUSES_S) - 1)]))
        tries += 1
    return True


def lost_round(round: int, folder: Path, on_disk: int | None) -> str:
    """Return the beginning of an error's sentence: what could not be saved, and what the disk has."""
    newest = "no checkpoint is there" if on_disk is None else f"the newest checkpoint there is of round {on_disk}"
    return f"round {round} could not be saved in {folder} within {LAST_SAVE_S:g} s, and {newest}"
