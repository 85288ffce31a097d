"""Choice of the next chunk and its donor: the bookkeeping of one fetch, without sockets or disks.

A chunk waits, is asked for, and is done. If its donor fails it waits again. When no chunk waits any more, chunks that
are long under way are asked for a second time (BitTorrent's endgame). Otherwise the fetch would end with the slowest
donor, or never if that donor is frozen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import trio

from peer.notifier import Notifier

SHARE_GRACE_S: Final = 1.0
ASKS_PER_CHUNK: Final = 2
_HEDGE_FIRST_S: Final = 1.0  # before the first chunk has told how long one takes
_HEDGE_MIN_S: Final = 0.1
_HEDGE_MAX_S: Final = 10.0
_SMOOTHING: Final = 0.3
_FIRST_DEADLINE_S: Final = 30.0
_DEADLINE_MIN_S: Final = 3.0
_DEADLINE_MAX_S: Final = 120.0
_DOUBLINGS_MAX: Final = 16  # more of them would only overflow: every cap is reached long before

DonorStatus = Literal["new", "useful", "lost", "gone", "refused", "none", "bad"]
"""The outcome of the last call. "gone": it does not hold this state, "refused": it does not say whether it does,
"none": it serves no states, "bad": it lied."""


NO_HOPE: Final[tuple[DonorStatus, ...]] = ("gone", "refused", "none", "bad")
"""From a donor of these nothing is awaited, though it may be asked again."""


class ChunkTree(Protocol):
    """The hashes of what is fetched: of a state (`peer.checkpoint.hash_tree`), or of a data set's pages."""

    @property
    def root(self) -> bytes: ...

    def span(self, index: int) -> tuple[int, int]:
        """Return the half-open byte range of a chunk."""
        ...

    def matches(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` is exactly that chunk."""
        ...


@dataclass(eq=False)
class Donor:
    """A fetch's view of one donor."""

    peer: str
    status: DonorStatus = "new"
    resting: bool = False
    """It is left alone for a while after a failure."""
    failures: int = 0
    """In a row."""
    bytes: int = 0
    """Delivered, as `chunks`."""
    chunks: int = 0
    asked: int = 0
    """Calls under way."""
    tried: int = 0
    """Calls begun."""
    typical_s: float | None = None
    """Smoothed seconds for one chunk."""

    @property
    def banned(self) -> bool:
        """Whether it sent wrong bytes or serves no states: it is not asked again in this fetch."""
        return self.status in ("none", "bad")

    @property
    def backoff(self) -> int:
        """The factor on its deadlines and pauses, doubled by each failure."""
        return 1 << min(self.failures, _DOUBLINGS_MAX)

    @property
    def deadline_s(self) -> float:
        """How long one chunk may take: a multiple of the usual time, more after each failure."""
        usual = _FIRST_DEADLINE_S if self.typical_s is None else max(8 * self.typical_s, _DEADLINE_MIN_S)
        return float(min(usual * self.backoff, _DEADLINE_MAX_S))

    def took(self, seconds: float) -> None:
        """Note the time of one chunk."""
        self.typical_s = _smooth(self.typical_s, seconds)


@dataclass(eq=False)
class Ask:
    """One request under way. Its scope is cancelled if another donor delivers the chunk first."""

    index: int
    donor: Donor
    since: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class ChunkScheduler:
    """Assigns the `missing` chunks of `tree` to donors. `finished` is set when all have arrived. `usual_s`: the seconds
    that a chunk took in fetches before this one."""

    def __init__(
        self,
        tree: ChunkTree,
        missing: Iterable[int],
        clock: Callable[[], float] = trio.current_time,
        usual_s: float | None = None,
    ) -> None:
        self.tree = tree
        self.finished = trio.Event()
        self.changed = Notifier()
        """Notified when a chunk is done or waits again."""
        self._clock = clock
        self._waiting = deque(sorted(missing))
        self._total = len(self._waiting)
        self._asked: dict[int, list[Ask]] = {}
        self._opened_at = clock()
        self._typical_s = usual_s
        self._finish_if_done()

    def take(self, donor: Donor, donors: Iterable[Donor]) -> Ask | None:
        """Return the next chunk for `donor`, one of `donors`; None if there is none for it now."""
        index = self._next(donor, [d for d in donors if not d.resting and d.status not in NO_HOPE])
        if index is None:
            return None
        ask = Ask(index, donor, self._clock())
        self._asked.setdefault(index, []).append(ask)
        donor.asked += 1
        donor.tried += 1
        return ask

    def deliver(self, ask: Ask) -> None:
        """Count the chunk of `ask`, which is verified and stored, and cancel other asks for it."""
        took = self._clock() - ask.since
        ask.donor.took(took)
        self._typical_s = _smooth(self._typical_s, took)
        rivals = self._asked.pop(ask.index, None)
        if rivals is None:
            return  # another donor was a moment faster
        start, end = self.tree.span(ask.index)
        ask.donor.bytes += end - start
        ask.donor.chunks += 1
        for rival in rivals:
            if rival is not ask:
                rival.scope.cancel()
        self._finish_if_done()
        self.changed.notify()

    def settle(self, ask: Ask) -> None:
        """Note the end of a call. Unless its chunk was delivered or is asked for elsewhere, the chunk waits again."""
        ask.donor.asked -= 1
        rivals = self._asked.get(ask.index)
        if rivals is not None and ask in rivals:
            rivals.remove(ask)
            if not rivals:
                del self._asked[ask.index]
                self._waiting.appendleft(ask.index)
                self.changed.notify()

    def _next(self, donor: Donor, active: list[Donor]) -> int | None:
        if not self._waiting:
            return self._overdue(donor)
        rivals = max(1, len(active))
        share = -(-(len(self._waiting) + len(self._asked)) // rivals)
        if donor.asked >= max(1, share):
            return None
        # One donor could deliver a small state before the second has answered: leave each its share for a moment.
        early = self._clock() - self._opened_at < SHARE_GRACE_S
        if early and any(d.chunks == 0 and d is not donor for d in active):
            fair_total = -(-self._total // rivals)
            if donor.chunks + donor.asked >= fair_total:
                return None
        return self._waiting.popleft()

    def _overdue(self, donor: Donor) -> int | None:
        """Return the chunk longest under way, if that is unusually long and `donor` is not asked for it already."""
        timeout = overdue_s(self._typical_s)
        now = self._clock()
        late = [
            (asks[0].since, index)
            for index, asks in self._asked.items()
            if len(asks) < ASKS_PER_CHUNK and asks[0].donor is not donor and now - asks[0].since > timeout
        ]
        return min(late)[1] if late else None

    def _finish_if_done(self) -> None:
        if not self._waiting and not self._asked:
            self.finished.set()


def overdue_s(typical_s: float | None) -> float:
    """Return the seconds after which a chunk is asked for a second time. `typical_s`: what one takes, if known."""
    return _HEDGE_FIRST_S if typical_s is None else min(max(2 * typical_s, _HEDGE_MIN_S), _HEDGE_MAX_S)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
