"""The side that gives: a peer serves the index and each page that it keeps, when no exchange needs its link."""

from __future__ import annotations

from typing import Final

import trio

from peer.data.pages.library import PageLibrary
from peer.errors import ProtocolViolation
from peer.net.rpc import Buffer, Call, Rpc
from swarm.pages.chunks import INDEX_CHUNK, PAGE_CHUNK
from swarm.state.messages import AskChunk, StateReply
from swarm.state.upload_limits import UploadSlots

LEAVING_MAX: Final = 8
"""Pages on their way at a time: 13 s of a link of 20 Mbit/s, and who asks awaits a page for 30 s at first."""
LEAVING_S: Final = 30.0
"""A page that has been leaving for so long is not read by the peer that asked, and does not count any more."""
BUSY_S: Final = 2.0


def serve_pages(rpc: Rpc, index: bytes, library: PageLibrary, slots: UploadSlots) -> None:
    """Answer those who ask for chunks of the data set, within `slots`. `index`: its index, as encoded."""
    root, pages = bytes.fromhex(library.wanted.root), library.index.pages
    leaving = dict[object, float]()  # since when

    async def chunk(call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        if call.body.state_hash != root:
            return StateReply("gone")
        page = call.body.index - 1
        if page >= pages:
            raise ProtocolViolation(f"asked for chunk {call.body.index} of {pages + 1}")
        if call.body.index != INDEX_CHUNK and page not in library:
            return StateReply("gone")
        data: bytes | None = index
        if call.body.index != INDEX_CHUNK:
            data = await trio.to_thread.run_sync(library.read, page)
            if data is None:
                return StateReply("gone")
        assert data is not None
        place, now = object(), trio.current_time()
        if sum(now - since < LEAVING_S for since in tuple(leaving.values())) >= LEAVING_MAX:
            return StateReply("busy", BUSY_S)

        def left() -> None:
            leaving.pop(place, None)

        leaving[place] = now
        pin = await slots.acquire(call.peer, len(data), left)
        if isinstance(pin, float):
            left()
            return StateReply("busy", pin)
        pin += data
        return StateReply("here"), pin

    rpc.register(PAGE_CHUNK, chunk)
