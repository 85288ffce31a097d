"""Fetching one page, or the index, from those who keep it. No donor is trusted: its bytes are compared with a hash.

Donors that sent wrong bytes are not asked again; those that did not answer rest. Beside a donor that takes twice as
long as the pages before, another is asked (`swarm.state.chunk_scheduler`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import trio

from peer.bounds import smoothed
from peer.config import PagesConfig
from peer.data.pages.folder import fault_of
from peer.data.pages.index import PageIndex
from peer.errors import ConfigError, NetworkError
from peer.net.backoff import Backoff
from peer.net.host import Host
from swarm.pages.chunks import INDEX_CHUNK, PAGE_CHUNK, ArrivingChunk, PageTree, chunk_of
from swarm.pages.holdings import Reputation
from swarm.state.chunk_fetch import ChunkFetch, KnownChunks
from swarm.state.chunk_scheduler import NO_HOPE, Donor, overdue_s

DONORS: Final = 4  # of one page: the others are asked where one fails
USUAL_MIN_S: Final = 0.5  # of a page: the second donor is asked after 1 s at the soonest
SMOOTHING: Final = 0.3  # of the time that a page takes
REST_S: Final = 10.0
REST_MAX_S: Final = 300.0


class PageFetcher:
    """Asks members for chunks of the data set. `holders(page)` are the members that keep one by their records; those of
    `last_resort` may have all, and are asked where no holder delivers. `reputation` notes what holders did."""

    def __init__(
        self,
        host: Host,
        wanted: PagesConfig,
        holders: Callable[[int], Sequence[str]],
        last_resort: Sequence[str],
        reputation: Reputation,
    ) -> None:
        self.reputation = reputation
        self._host, self._wanted, self._holders = host, wanted, holders
        self._last_resort = [peer for peer in last_resort if peer != host.peer_id]
        self._resting = Backoff(REST_S, REST_MAX_S)
        self._usual_s: float | None = None  # of one page
        self._random = random.Random()

    async def fetch_index(self, members: Sequence[str]) -> bytes:
        """Return the index, from the last resort or a member. Raises NetworkError."""
        return await self._fetch(PageTree(self._wanted), INDEX_CHUNK, self._last_resort, members)

    async def fetch_page(self, index: PageIndex, page: int) -> bytes:
        """Return a page. Raises NetworkError where none delivers it; ConfigError for one that no peer can train on."""
        holders = self._chosen(page)
        if not (holders or self._fit(self._last_resort)):
            raise NetworkError(f"no peer that can be reached keeps page {page} of the data set")
        data = await self._fetch(PageTree(self._wanted, index), chunk_of(page), holders, self._last_resort)
        if fault := await trio.to_thread.run_sync(partial(fault_of, index, page, data)):
            raise ConfigError(f"the data set {fault}: no peer can train on it, build it again and begin a new run")
        return data

    def _chosen(self, page: int) -> list[str]:
        """Return holders to ask, at random; those that failed lately only where there are no others."""
        holders = [peer for peer in self._fit(self._holders(page)) if peer not in self._last_resort]
        awake = [peer for peer in holders if not self._resting.paused(peer)] or holders
        return self._random.sample(awake, min(DONORS, len(awake)))

    def _fit(self, peers: Sequence[str]) -> list[str]:
        return [peer for peer in peers if peer != self._host.peer_id and peer not in self.reputation.liars]

    async def _fetch(self, tree: PageTree, chunk: int, first: Sequence[str], then: Sequence[str]) -> bytes:
        """Ask the `first` donors, and once none of them has hope or all are late, those that come `then`, too."""
        arriving, began, late_s = ArrivingChunk(tree, chunk), trio.current_time(), overdue_s(self._usual_s)

        def donors() -> list[str]:
            asked = [fetch.donors[peer] for peer in first if peer in fetch.donors]
            failed = all(donor.status not in ("new", "useful") for donor in asked)
            more = (failed and len(asked) == len(first)) or trio.current_time() - began > late_s
            return self._fit([*first, *then] if more else first)

        known = KnownChunks(tree, PAGE_CHUNK, self._usual_s)
        fetch = ChunkFetch(self._host.rpc, donors, tree.root, arriving, self._host.events, known)
        try:
            await fetch.run()
        finally:
            self._note(fetch.donors)
        return arriving.data

    def _note(self, donors: Mapping[str, Donor]) -> None:
        """Remember how long a page took, who lied or gave nothing, and who was late: another one delivered what was
        asked of it, too."""
        times = [donor.typical_s for donor in donors.values() if donor.typical_s is not None]
        if times:
            self._usual_s = max(smoothed(self._usual_s, min(times), SMOOTHING), USUAL_MIN_S)
        for donor in donors.values():
            if donor.status == "bad":
                self.reputation.liars.add(donor.peer)
            elif donor.chunks:
                self._resting.reset(donor.peer)
                self.reputation.doubted.reset(donor.peer)
            elif donor.status == "lost" or donor.status in NO_HOPE or (times and donor.tried):
                twice = donor.peer in self._resting
                if twice and (times or donor.status in NO_HOPE):  # else this peer may be the one that is cut off
                    self.reputation.doubted.failed(donor.peer)
                self._resting.failed(donor.peer)
