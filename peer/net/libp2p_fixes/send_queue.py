"""What waits to leave on one Yamux connection, and the one task that writes it.

Frames leave whole, whoever is cancelled meanwhile. Control frames go first and never wait; data keeps its order, and
its writers wait for room. Both are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

DATA_BYTES: Final = 4 * 65536
SMALL_FRAME: Final = 4096
FRAMES_MAX: Final = 8192


class SendQueue:
    """`overflow` is called when a peer makes us answer faster than it reads the answers."""

    def __init__(self, overflow: Callable[[], None]) -> None:
        self._overflow = overflow
        self._control: deque[bytes] = deque()
        self._data: deque[bytes] = deque()
        self._data_bytes = 0
        self._writing = False
        self._closed = False
        self._filled = trio.lowlevel.ParkingLot()
        self._emptied = trio.lowlevel.ParkingLot()
        self._drained = trio.lowlevel.ParkingLot()

    def is_full_for(self, count: int) -> bool:
        """Whether a data frame of `count` bytes has to wait. Small ones may pass bulk that is waiting for room. A
        closed outbox, which drops them, is never full: else who asks and waits in a loop would do so for ever."""
        return not self._closed and self._data_bytes >= (DATA_BYTES if count > SMALL_FRAME else 2 * DATA_BYTES)

    async def wait_room(self) -> None:
        """Return when there may be room, or the outbox is closed."""
        if self._closed:
            await trio.lowlevel.checkpoint()
        else:
            await self._emptied.park()

    def put(self, frame: bytes) -> None:
        """Queue a frame behind all data. Nothing happens once the outbox is closed."""
        if self._append(self._data, frame):
            self._data_bytes += len(frame)

    def put_control(self, frame: bytes) -> None:
        """Queue a frame before all data."""
        self._append(self._control, frame)

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write what is queued, as much as there is at once, until cancelled or `write` fails."""
        while True:
            while not (self._control or self._data):
                self._drained.unpark_all()
                await self._filled.park()
            batch = [*self._control, *self._data]
            self._control.clear()
            self._data.clear()
            self._data_bytes = 0
            self._emptied.unpark_all()
            self._writing = True
            await write(b"".join(batch) if len(batch) > 1 else batch[0])
            self._writing = False

    async def wait_drained(self) -> None:
        """Return when everything has been written."""
        while self._writing or self._control or self._data:
            await self._drained.park()

    def close(self) -> None:
        """Take no more frames; what is queued may still leave. Whoever waits for room waits no longer."""
        self._closed = True
        self._emptied.unpark_all()

    def clear(self) -> None:
        """Drop everything and wake whoever waits."""
        self.close()
        self._control.clear()
        self._data.clear()
        self._data_bytes = 0
        self._writing = False
        self._emptied.unpark_all()
        self._drained.unpark_all()

    def _append(self, queue: deque[bytes], frame: bytes) -> bool:
        if len(queue) >= FRAMES_MAX:
            self._overflow()
        if self._closed:
            return False
        queue.append(frame)
        self._filled.unpark_all()
        return True
