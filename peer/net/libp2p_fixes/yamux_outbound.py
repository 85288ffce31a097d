"""The streams that one connection may have open to the peer at a time."""

from __future__ import annotations

from typing import Final

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamError

STREAMS_OUT_MAX: Final = 256
OPEN_WAIT_S: Final = 5.0


class OutboundSlots:
    """The slots of outgoing streams. Stock 0.8.1 waits without end for a 257th."""

    def __init__(self) -> None:
        self._free = trio.Semaphore(STREAMS_OUT_MAX)

    async def acquire(self) -> None:
        """Take a slot, without a checkpoint if one is free. Raises MuxedStreamError after `OPEN_WAIT_S`."""
        try:
            self._free.acquire_nowait()
        except trio.WouldBlock:
            with trio.move_on_after(OPEN_WAIT_S) as waiting:
                await self._free.acquire()
            if waiting.cancelled_caught:
                problem = f"{STREAMS_OUT_MAX} streams to this peer are open"
                raise MuxedStreamError(f"{problem}: finish some before opening more") from None

    def release(self) -> None:
        """Give a slot back."""
        self._free.release()
