"""Whatever builds the next outer state: one at a time, for all of them build it in the same buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class BuildLock:
    """One builder's time. `over` is set when it writes nothing any more; `stopped`: somebody else wanted to build."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        self.stopped = False

    @contextmanager
    def ends(self) -> Iterator[None]:
        """The builder's work happens inside; left early if it is stopped."""
        try:
            with self.scope:
                yield
        finally:
            self.over.set()

    async def stop(self) -> None:
        """Returns when nothing is written any more."""
        self.stopped = True
        self.scope.cancel()
        await self.over.wait()
