"""The samples that a peer trains on: are they on this machine yet? Of its own text they always are; pages of a data set
come from other peers (`swarm.pages`)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from peer.ipc.corpus_messages import PageFolders
from swarm.protocol.ledger import Range


class SampleSupply(Protocol):
    """What brings samples to this machine."""

    @property
    def folders(self) -> PageFolders | None:
        """Where pages lie; None for text of this machine's own."""
        ...

    @property
    def has_held_out(self) -> bool:
        """Whether the held-out samples are here."""
        ...

    def expect(self, ranges: Sequence[Range]) -> None:
        """Fetch the samples of this plan, and what the next plan likely asks for, when there is time."""
        ...

    def holding(
        self, ranges: Sequence[Range], timeout_s: float = math.inf, enough: Callable[[], bool] = lambda: False
    ) -> AbstractAsyncContextManager[tuple[Range, ...]]:
        """Wait until all samples of `ranges` are here, and keep them here inside the block. Yields those that are, from
        the first on: all, unless `timeout_s` passes, `enough()` holds or there is no room for more."""
        ...


class OwnSamples:
    """The supply of a peer that trains on its own text."""

    folders: PageFolders | None = None
    has_held_out = True

    def expect(self, ranges: Sequence[Range]) -> None:
        """Do nothing: all are here."""

    @asynccontextmanager
    async def holding(
        self, ranges: Sequence[Range], timeout_s: float = math.inf, enough: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[tuple[Range, ...]]:
        yield tuple(ranges)
