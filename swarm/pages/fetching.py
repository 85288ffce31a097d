"""Fetching one page, or the index, from those who keep it. No donor is trusted: its bytes are compared with a hash.

Donors that sent wrong bytes are not asked again; those that did not answer rest. A donor that delays is passed over
within a second or two, as another is asked beside it (`swarm.state.chunk_scheduler`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio

from peer.config import PagesConfig
from peer.data.pages.folder import fault_of
from peer.data.pages.index import PageIndex
from peer.errors import ConfigError, NetworkError
from peer.net.backoff import Backoff
from peer.net.host import Host
from swarm.pages.chunks import INDEX_CHUNK, PAGE_CHUNK, ArrivingChunk, PageTree, chunk_of
from swarm.state.chunk_fetch import ChunkFetch, KnownChunks
from swarm.state.chunk_scheduler import Donor

DONORS: Final = 4  # of one page: the others are asked where one fails
REST_S: Final = 10.0
REST_MAX_S: Final = 300.0


class PageFetcher:
    """Asks members for chunks of the data set. `holders(page)` are the members that keep one by their records; those of
    `last_resort` may have all, and are asked where no holder delivers."""

    def __init__(
        self, host: Host, wanted: PagesConfig, holders: Callable[[int], Sequence[str]], last_resort: Sequence[str]
    ) -> None:
        self.liars = set[str]()
        self._host, self._wanted, self._holders = host, wanted, holders
        self._last_resort = [peer for peer in last_resort if peer != host.peer_id]
        self._resting = Backoff(REST_S, REST_MAX_S)
        self._random = random.Random()

    async def fetch_index(self, members: Sequence[str]) -> bytes:
        """Return the index, from the last resort or a member. Raises NetworkError."""
        return await self._fetch(PageTree(self._wanted), INDEX_CHUNK, [*self._last_resort, *members])

    async def fetch_page(self, index: PageIndex, page: int) -> bytes:
        """Return a page. Raises NetworkError where nobody delivers it; ConfigError for one that nobody can train on."""
        donors = self._donors(page)
        if not donors:
            raise NetworkError(f"no peer that can be reached keeps page {page} of the data set")
        data = await self._fetch(PageTree(self._wanted, index), chunk_of(page), donors)
        if fault := await trio.to_thread.run_sync(partial(fault_of, index, page, data)):
            raise ConfigError(f"the data set {fault}: no peer can train on it, build it again and begin a new run")
        return data

    def _donors(self, page: int) -> list[str]:
        """Return whom to ask, in this order: holders at random, those that failed lately last, then the last resort."""
        me = self._host.peer_id
        holders = [peer for peer in self._holders(page) if peer != me and peer not in self._last_resort]
        self._random.shuffle(holders)
        holders.sort(key=self._resting.paused)
        return [peer for peer in [*holders[:DONORS], *self._last_resort] if peer not in self.liars]

    async def _fetch(self, tree: PageTree, chunk: int, donors: Sequence[str]) -> bytes:
        arriving = ArrivingChunk(tree, chunk)
        asked = [peer for peer in donors if peer != self._host.peer_id and peer not in self.liars]
        fetch = ChunkFetch(
            self._host.rpc, lambda: asked, tree.root, arriving, self._host.events, KnownChunks(tree, PAGE_CHUNK)
        )
        try:
            await fetch.run()
        finally:
            self._note(fetch.donors)
        return arriving.data

    def _note(self, donors: dict[str, Donor]) -> None:
        """Remember who lied and who failed. The first one was asked first: where another one delivered, it was late."""
        delivered = any(donor.chunks for donor in donors.values())
        for place, donor in enumerate(donors.values()):
            late = place == 0 and delivered and not donor.chunks
            if donor.status == "bad":
                self.liars.add(donor.peer)
            elif donor.chunks:
                self._resting.reset(donor.peer)
            elif late or donor.status == "lost":
                self._resting.failed(donor.peer)
