"""The frames to be sent on one Yamux connection. One task writes them.

A frame is always sent whole, even if its writer is cancelled. Control frames go first and never wait. Data frames keep
their order, and their writers wait for room. Both queues are bounded.
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
    """A bounded queue of frames. `overflow` is called when a peer makes us answer faster than it reads the answers."""

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
        """Return whether a data frame of `count` bytes has to wait. Small ones may pass big ones that wait for room.

        A closed queue drops frames and is never full, so that a writer that waits in a loop ends."""
        return not self._closed and self._data_bytes >= (DATA_BYTES if count > SMALL_FRAME else 2 * DATA_BYTES)

    async def wait_room(self) -> None:
        """Return when there may be room, or the queue is closed."""
        if self._closed:
            await trio.lowlevel.checkpoint()
        else:
            await self._emptied.park()

    def put(self, frame: bytes) -> None:
        """Queue a frame behind all data. A closed queue drops it."""
        if self._append(self._data, frame):
            self._data_bytes += len(frame)

    def put_control(self, frame: bytes) -> None:
        """Queue a frame before all data."""
        self._append(self._control, frame)

    def put_aside(self, frame: bytes) -> None:
        """Queue a frame that the peer does not wait for. It leaves with the next frame, before all data."""
        self._append(self._control, frame, wake=False)

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write queued frames, in batches, until cancelled or `write` fails."""
        while True:
            while not (self._control or self._data):
                self._drained.unpark_all()
                await self._filled.park()
            batch = [*self._control, *self._data]
            self._control.clear()
            self._data.clear()
            self._data_bytes = 0
            if self._emptied:
                self._emptied.unpark_all()
            self._writing = True
            await write(b"".join(batch) if len(batch) > 1 else batch[0])
            self._writing = False

    async def wait_drained(self) -> None:
        """Return when everything has been written."""
        while self._writing or self._control or self._data:
            await self._drained.park()

    def close(self) -> None:
        """Take no more frames and wake writers that wait for room. Queued frames may still be sent."""
        self._closed = True
        self._emptied.unpark_all()

    def clear(self) -> None:
        """Drop everything and wake all waiting tasks."""
        self.close()
        self._control.clear()
        self._data.clear()
        self._data_bytes = 0
        self._writing = False
        self._emptied.unpark_all()
        self._drained.unpark_all()

    def _append(self, queue: deque[bytes], frame: bytes, wake: bool = True) -> bool:
        if len(queue) >= FRAMES_MAX:
            self._overflow()
        if self._closed:
            return False
        queue.append(frame)
        if wake and self._filled:
            self._filled.unpark_all()
        return True
