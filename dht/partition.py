"""Is what we see the whole run, or only one half of a split network? Pure.

Two signs: more than half of the peers we knew were lost within the window (either they died or we are cut off), and a
peer we reach whose neighbourhood shares nobody with ours (two networks that never met, as when two joiners used
different bootstraps).
"""

from __future__ import annotations

from typing import Final, Literal

LOST_MAX: Final = 256

Change = Literal["suspected", "healed"]


class SplitWatch:
    """Keeps the list of lost peers and judges it. Times are monotonic seconds."""

    def __init__(self, window_s: float = 600.0) -> None:
        self._window_s = window_s
        self._lost: dict[str, float] = {}
        self.suspected = False

    @property
    def lost(self) -> tuple[str, ...]:
        """Peers that vanished without saying goodbye and may come back, latest first."""
        return tuple(reversed(self._lost))

    def peer_lost(self, peer: str, now: float) -> None:
        self._lost.pop(peer, None)
        self._lost[peer] = now
        if len(self._lost) > LOST_MAX:
            del self._lost[next(iter(self._lost))]

    def peer_back(self, peer: str) -> None:
        """A peer was heard from, or has left in order."""
        self._lost.pop(peer, None)

    def judge(self, alive: int, now: float) -> Change | None:
        """Compare the peers lost with those alive; say what has changed since the last call."""
        for peer in [peer for peer, at in self._lost.items() if now - at > self._window_s]:
            del self._lost[peer]  # dead for good
        suspected = len(self._lost) > alive
        if suspected == self.suspected:
            return None
        self.suspected = suspected
        return "suspected" if suspected else "healed"


def views_disjoint(ours: set[str], theirs: set[str], knew_us: bool) -> bool:
    """Whether a peer's view of our own neighbourhood has nothing to do with ours.

    `theirs` and `ours` leave out both sides themselves. An empty view proves nothing: somebody has just started.
    """
    return not knew_us and bool(ours) and bool(theirs) and ours.isdisjoint(theirs)
