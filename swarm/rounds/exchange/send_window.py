"""How much of its update a peer sends at once: about what its link carries in half a second.

A slice is merged once all of it has arrived, and its result comes back while the next ones go out. If a slow link sent
all slices at once, they would arrive together, and no result could come before most of the update is gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

import trio

from peer.notifier import Notifier

WINDOW_MIN: Final = 4 << 20  # bytes: two of the longest slices at 8 bits, one sent while one is answered
QUICK_S: Final = 0.5  # what arrives sooner widens the window
SLOW_S: Final = 1.0
PATIENCE_S: Final = 3.0
"""A delivery that takes longer, and twice as long as the last, holds no other back: its owner may be frozen."""
SENDS_PER_OWNER: Final = 2  # keeps a link busy while a call waits for its answer, and leaves room for other peers

Send = Callable[[str, int], Awaitable[bool]]
"""Deliver a slice to its owner, given its index. Returns whether it was taken."""


@dataclass(frozen=True, eq=False)
class _Delivery:
    owner: str
    size_bytes: int
    began_at: float


class SendWindow:
    """The window of one peer. It lasts from exchange to exchange."""

    def __init__(self) -> None:
        self.size_bytes = WINDOW_MIN
        self._under_way: set[_Delivery] = set()
        self._patience_s = PATIENCE_S
        self._ended = Notifier()

    async def send_all(self, parts: Mapping[str, Sequence[int]], sizes: Sequence[int], send: Send) -> None:
        """Send each owner its slices: one each in turn, so that all owners can merge early. `sizes`: bytes by index."""
        rounds = zip_longest(*([(owner, index) for index in part] for owner, part in parts.items()))
        waiting = [item for item in chain.from_iterable(rounds) if item is not None]
        async with trio.open_nursery() as nursery:
            while waiting:
                if (at := self._next(waiting, sizes)) is None:
                    await self._ended.wait(PATIENCE_S / 2)
                    continue
                owner, index = waiting.pop(at)
                delivery = _Delivery(owner, sizes[index], trio.current_time())
                self._under_way.add(delivery)
                nursery.start_soon(self._deliver, delivery, index, send)

    def _next(self, waiting: Sequence[tuple[str, int]], sizes: Sequence[int]) -> int | None:
        """Return the place of the first slice that fits. No owner has more than half of the window, or a single
        slice."""
        since = trio.current_time() - self._patience_s
        counted = sum(each.size_bytes for each in self._under_way if each.began_at > since)
        theirs: dict[str, list[int]] = {}
        for each in self._under_way:
            theirs.setdefault(each.owner, []).append(each.size_bytes)
        for place, (owner, index) in enumerate(waiting):
            size, before = sizes[index], theirs.get(owner, ())
            if counted and counted + size > self.size_bytes:
                continue
            if not before or (len(before) < SENDS_PER_OWNER and 2 * (sum(before) + size) <= self.size_bytes):
                return place
        return None

    async def _deliver(self, delivery: _Delivery, index: int, send: Send) -> None:
        used = sum(each.size_bytes for each in self._under_way)
        try:
            taken = await send(delivery.owner, index)
        finally:
            self._under_way.discard(delivery)
            self._ended.notify()
        seconds = trio.current_time() - delivery.began_at
        self._patience_s = max(PATIENCE_S, 2 * seconds)
        if taken and seconds < QUICK_S and 2 * used >= self.size_bytes:  # a window that is not used grows no further
            self.size_bytes += delivery.size_bytes
        elif seconds > SLOW_S:
            self.size_bytes = max(WINDOW_MIN, self.size_bytes // 2)
