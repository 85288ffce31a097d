"""Pages on the wire: chunks of a state that the root of the data set names. Chunk 0 is the index, chunk p + 1
page p."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from peer.config import PagesConfig
from peer.data.pages.index import PAGE_BYTES_MAX, PageIndex
from peer.net.rpc import Method
from swarm.state.chunk_scheduler import ChunkTree
from swarm.state.messages import AskChunk, StateReply

INDEX_CHUNK: Final = 0
PAGE_CHUNK: Final = Method(
    "pages.chunk", AskChunk, StateReply, reply_payload_max=PAGE_BYTES_MAX, access="client", replies_bounded=True
)


def chunk_of(page: int) -> int:
    """Return the chunk that a page is."""
    return page + 1


class PageTree:
    """The chunks of a data set; before its index is known, the index alone."""

    def __init__(self, wanted: PagesConfig, index: PageIndex | None = None) -> None:
        self.root: Final = bytes.fromhex(wanted.root)
        self._wanted, self._index = wanted, index

    def span(self, index: int) -> tuple[int, int]:
        """Return the size of a chunk as a range: pages are numbered, and have no place in a whole."""
        if index == INDEX_CHUNK or self._index is None:
            return 0, self._wanted.index_bytes
        return 0, self._index.page_bytes(index - 1)

    def matches(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` is exactly that chunk."""
        if index == INDEX_CHUNK:
            return len(data) == self._wanted.index_bytes and blake3(data).digest() == self.root
        return self._index is not None and self._index.matches(index - 1, data)


class ArrivingChunk:
    """One chunk in memory. Implements `swarm.state.chunk_fetch.Arriving`."""

    def __init__(self, tree: PageTree, index: int) -> None:
        first, end = tree.span(index)
        self.size_bytes = self.wanted_bytes = end - first
        self.chunks = frozenset({index})
        self.data = b""
        """Its bytes, once they have come."""

    def intact(self, tree: ChunkTree) -> set[int]:
        """Return what is there already: nothing."""
        return set()

    def store(self, tree: ChunkTree, index: int, data: memoryview) -> bool:
        """Keep the chunk if its hash is right."""
        if not tree.matches(index, data):
            return False
        self.data = bytes(data)
        return True
