"""What failed a moment ago and is not to be tried again yet."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import trio

_NAMES_MAX: Final = 1024


class Cooldown:
    """A fixed pause per name (a peer) after each failure. Bounded: 1024 names, the longest paused forgotten first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        """Whether the pause after its last failure is still going on."""
        return trio.current_time() < self._until.get(name, 0.0)

    def __len__(self) -> int:
        return len(self._until)

    def begin(self, name: str) -> None:
        """It has just failed."""
        now = trio.current_time()
        self._until.pop(name, None)
        self._until[name] = now + self._seconds
        while len(self._until) > _NAMES_MAX or next(iter(self._until.values())) <= now:  # the oldest stands first
            self._until.popitem(last=False)

    def end(self, name: str) -> None:
        """It may be tried at once."""
        self._until.pop(name, None)
