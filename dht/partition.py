"""Detects a split network. Pure.

There are two signs. More than half of the known peers were lost within the window: they died, or we are cut off. Or a
peer's view of our neighbourhood shares no peer with ours: two networks that never met, for instance because two joiners
used different bootstrap peers.
"""

from __future__ import annotations

from typing import Final, Literal

from peer.bounds import Latest

LOST_MAX: Final = 256

Change = Literal["suspected", "healed"]


class SplitWatch:
    """The recently lost peers, and whether they are too many. Times are monotonic seconds."""

    def __init__(self, window_s: float = 600.0) -> None:
        self._window_s = window_s
        self._lost = Latest[str, float](LOST_MAX)
        self.suspected = False

    @property
    def lost(self) -> tuple[str, ...]:
        """Peers that vanished without a goodbye and may come back, latest first."""
        return tuple(reversed(self._lost))

    def peer_lost(self, peer: str, now: float) -> None:
        self._lost[peer] = now

    def peer_back(self, peer: str) -> None:
        """Drop a peer that has answered, or that said goodbye."""
        self._lost.pop(peer, None)

    def judge(self, alive: int, now: float) -> Change | None:
        """Compare the number of lost peers with those alive; return what has changed since the last call."""
        for peer in [peer for peer, at in self._lost.items() if now - at > self._window_s]:
            del self._lost[peer]  # it will not come back
        suspected = len(self._lost) > alive
        if suspected == self.suspected:
            return None
        self.suspected = suspected
        return "suspected" if suspected else "healed"


def views_disjoint(ours: set[str], theirs: set[str], knew_us: bool) -> bool:
    """Return whether a peer's view of our neighbourhood has no peer in common with ours.

    Both views leave out the peer and us. An empty view proves nothing: its node may just have started.
    """
    return not knew_us and bool(ours) and bool(theirs) and ours.isdisjoint(theirs)
