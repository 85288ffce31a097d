"""The task that publishes which pages this peer keeps, and reads what others do."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import trio

from dht.node import Node
from peer.catalogue.pages import HoldersUnread, PagesKept
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.notifier import Notifier
from swarm.pages.holdings import HOLDINGS, HolderView, HoldingsRecord, PageRanges, Reputation, holdings_key
from swarm.run.gate import Gate

TTL_S: Final = 45.0
REFRESH_S: Final = 10.0
PAUSE_S: Final = 2.0  # between two records, however fast pages come
SAFE_HOLDERS: Final = 2
"""With fewer a range of pages could be lost with one peer."""


class PageHolders:
    """Who keeps which pages, this peer among them. Event `pages_kept`: how much this peer keeps, and how many ranges of
    all have fewer than `SAFE_HOLDERS` holders."""

    def __init__(self, node: Node, gate: Gate, run_id: str, me: str, events: EventLog) -> None:
        self.me = me
        self.reputation = Reputation()
        self._node, self._gate, self._key, self._events = node, gate, holdings_key(run_id), events
        self._held: Callable[[], Collection[int]] = tuple
        self._told: PagesKept | None = None
        self.view: HolderView | None = None
        self._soon = Notifier()
        self._is_news = False  # whether the record is due

    def begin(self, pages: int, held: Callable[[], Collection[int]]) -> HolderView:
        """Begin to publish, and return the view. `held` returns the pages kept here."""
        self._held = held
        self.view = HolderView(PageRanges(pages))
        return self.view

    def announce(self) -> None:
        """Publish what is kept here soon."""
        self._is_news = True
        self._soon.notify()

    async def run(self) -> None:
        """Publish and read until cancelled."""
        assert self.view is not None
        while True:
            try:
                await self._refresh(self.view)
            except BarnraiseError as error:
                self._events.emit(HoldersUnread(reason=str(error)))
            await trio.sleep(PAUSE_S)
            if not self._is_news:
                await self._soon.wait(REFRESH_S - PAUSE_S)

    async def _refresh(self, view: HolderView) -> None:
        self._is_news = False
        held = self._held()
        kept = view.ranges.encode(held)
        record = HoldingsRecord(at=time.time(), kept=kept, credential=self._gate.chain)
        await self._node.put(HOLDINGS, self._key, record, TTL_S)
        found = await self._node.get(HOLDINGS, self._key)
        believed = {peer: entry.value for peer, entry in found.items() if self.reputation.believes(peer)}
        view.learn(believed | {self.me: record})
        rare = int((view.counts < SAFE_HOLDERS).sum())
        told = PagesKept(pages=len(held), total=view.ranges.pages, ranges=view.ranges.count, rare=rare)
        if told != self._told:
            self._told = told
            self._events.emit(told)
