"""The state of a run's data set, from the records of who keeps which pages and the events that were told. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from peer.catalogue.pages import PageMissing, SamplesAwaited
from swarm.pages.holders import SAFE_HOLDERS
from swarm.pages.holdings import Flags, HolderView, PageRanges
from swarm.pages.sizes import DataSetSizes
from swarm.status.data_set import DataSetState, MemberPages, MissingPage
from swarm.status.member_told import TOLD_S, Told
from swarm.status.reading import RunReading

RECENT_S: Final = 60.0
MISSING_MAX: Final = 8


def data_set_state(reading: RunReading, told: Told) -> DataSetState | None:
    """Return the state; None for a run without a data set."""
    data = reading.manifest.data
    sizes = DataSetSizes.of(data)
    if sizes is None:
        return None
    view = HolderView(PageRanges(sizes.pages))
    view.learn(reading.holdings)
    waited_s = _waited_s(told, reading.at)
    missing = _missing(view, {peer: events for peer, events in told.items() if peer in reading.records}, reading.at)
    kept = {peer: _pages(view.ranges, flags) for peer, flags in view.kept.items()}
    tokens, trained = sizes.windows * data.seq_len, reading.progress[1]
    return DataSetState(
        root=sizes.root,
        tokens=tokens,
        epochs=trained / tokens,
        tokens_left=tokens - trained % tokens,
        pages=sizes.pages,
        ranges=view.ranges.count,
        rare=int((view.counts < SAFE_HOLDERS).sum()),
        unkept=int((view.counts == 0).sum()),
        waited_s=round(sum(waited_s.values()), 3),
        members={
            peer: MemberPages(kept=kept.get(peer, 0), waited_s=round(waited_s.get(peer, 0.0), 3))
            for peer in sorted({*kept, *waited_s})
        },
        missing=tuple(missing[:MISSING_MAX]),
    )


def _pages(ranges: PageRanges, flags: Flags) -> int:
    """Return the number of pages of the ranges with a flag; the last range may be shorter than the others."""
    short = ranges.count * ranges.length - ranges.pages
    return int(flags.sum(dtype=np.int64)) * ranges.length - int(flags[-1]) * short


def _waited_s(told: Told, now: float) -> dict[str, float]:
    """Return the seconds that each peer has waited for pages in the last `TOLD_S`, of those that told of any."""
    found = dict[str, float]()
    for peer, events in told.items():
        for at, event in events:
            if isinstance(event, SamplesAwaited) and at >= now - TOLD_S:
                found[peer] = min(TOLD_S, found.get(peer, 0.0) + max(0.0, event.seconds))  # max drops NaN
    return found


def _missing(view: HolderView, told: Told, now: float) -> list[MissingPage]:
    """Return the pages that peers miss. A peer tells so once, and never that a page has come: after a minute it is
    believed only of a page that no peer keeps."""
    found = dict[int, list[str]]()
    for peer, events in told.items():
        for at, event in events:
            if not isinstance(event, PageMissing) or not 0 <= event.page < view.ranges.pages or at < now - TOLD_S:
                continue
            holders = view.holders(event.page)
            if peer not in holders and (not holders or at >= now - RECENT_S):
                peers = found.setdefault(event.page, [])
                peers += [] if peer in peers else [peer]
    return [MissingPage(page=n, peers=tuple(peers), holders=len(view.holders(n))) for n, peers in sorted(found.items())]
