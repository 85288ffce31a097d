"""The timers behind a regroup: since when known peers are silent and a majority is missing. No clock of its own."""

from __future__ import annotations

from swarm.coordinator.rules import RegroupTimeouts


class MajorityWatch:
    """Decides when a silence has lasted long enough. Every method takes the current time in seconds.

    ```
    missing:  gathered() ──► not missing ──missing_s()──► missing since t ──gathered()──► not missing
    unheard:  heard()    ──► heard       ──may_leave()──► unheard since t ──heard()─────► heard
    ```
    """

    def __init__(self, timeouts: RegroupTimeouts) -> None:
        self._timeouts = timeouts
        self._known_at = 0.0
        self._unheard_since: float | None = None
        self._missing_since: float | None = None

    def known_answered(self, now: float) -> None:
        """Note that a known member answered, or that the watch begins."""
        self._known_at = now

    def trusts_strangers(self, now: float) -> bool:
        """Return whether known members have been silent so long that all of them may have been replaced."""
        return now - self._known_at > self._timeouts.strangers_s

    def heard(self) -> None:
        """Note that a majority of the last head's members answered, whatever head they are at, or is a new one."""
        self._unheard_since = None

    def may_leave(self, now: float) -> bool:
        """Return whether no majority has answered for `gone_s`, although other peers did. Starts that time."""
        if self._unheard_since is None:
            self._unheard_since = now
        return now - self._unheard_since >= self._timeouts.gone_s

    def gathered(self) -> None:
        """Note that a majority can continue, or that nothing can be said about it."""
        self._missing_since = None

    def missing_s(self, now: float) -> float | None:
        """Return for how long no majority could continue; None the first time, which starts that time."""
        if self._missing_since is None:
            self._missing_since = now
            return None
        return now - self._missing_since
