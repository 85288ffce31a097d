"""The side that gives: a peer serves the index and each page that it keeps, when no exchange needs its link."""

from __future__ import annotations

import trio

from peer import faults
from peer.data.pages.library import PageLibrary
from peer.errors import ProtocolViolation
from peer.net.rpc import Buffer, Call, Rpc
from swarm.pages.chunks import INDEX_CHUNK, PAGE_CHUNK
from swarm.state.messages import AskChunk, StateReply
from swarm.state.upload_limits import UploadSlots


def serve_pages(rpc: Rpc, index: bytes, library: PageLibrary, slots: UploadSlots) -> None:
    """Answer those who ask for chunks of the data set, within `slots`. `index`: its index, as encoded."""
    root, pages = bytes.fromhex(library.wanted.root), library.index.pages

    async def chunk(call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        faults.reach("during_page_transfer", call.body.index)
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
        pin = await slots.acquire(call.peer, len(data))
        if isinstance(pin, float):
            return StateReply("busy", pin)
        pin += data
        return StateReply("here"), pin

    rpc.register(PAGE_CHUNK, chunk)
