"""How long a donor keeps a snapshot for those that read it, and which of several readers' claims is the weakest."""

from __future__ import annotations

import time

from swarm.state.upload_limits import SnapshotLimits


class LeaseClock:
    """A clock that stops while exchanges hold readers back, however many overlap: a wait that the reader could not
    avoid costs its lease nothing. Reading it takes no lock; `begin` and `end` are called under that of the store."""

    def __init__(self) -> None:
        self._exchanges = 0
        self._reading: tuple[float | None, float] = (None, 0.0)  # (stands since, time that does not count)

    @property
    def now(self) -> float:
        """Seconds without those of exchanges."""
        since, stopped_s = self._reading
        return (time.monotonic() if since is None else since) - stopped_s

    def begin(self) -> None:
        """Note that an exchange begins."""
        if not self._exchanges:
            self._reading = (time.monotonic(), self._reading[1])
        self._exchanges += 1

    def end(self) -> None:
        """Note that an exchange has ended."""
        self._exchanges -= 1
        since, stopped_s = self._reading
        if not self._exchanges and since is not None:
            self._reading = (None, stopped_s + time.monotonic() - since)


class Lease:
    """The time for which a snapshot is kept for its readers: while a new chunk is on its way to one, and a pause after.

    A reader that makes progress holds a buffer until it has all chunks or turns to another state. One that is slow,
    repeats itself or has died holds it for seconds. Times do not count while an exchange holds readers back, but for
    the longest one. They are not trio's, since commits and readers are in different threads.
    """

    def __init__(self, limits: SnapshotLimits, chunks: int, clock: LeaseClock) -> None:
        """`chunks`: of which the state consists."""
        self._limits, self._chunks, self._clock = limits, chunks, clock
        self._began = float("inf")
        self._ends_at = float("-inf")  # by the clock on the wall
        self._progress_at = float("-inf")
        self._until: dict[str, float] = {}  # by reader
        self._had: dict[str, set[int]] = {}
        self._on_their_way: dict[tuple[str, int], float] = {}  # with the time after which it counts no more

    @property
    def is_on(self) -> bool:
        """Whether the snapshot should stay."""
        now = self._clock.now
        held = any(now < until for until in (*tuple(self._until.values()), *tuple(self._on_their_way.values())))
        return held and time.monotonic() < self._ends_at

    @property
    def idle_s(self) -> float:
        """How long ago a reader has come or a new chunk has left."""
        return self._clock.now - self._progress_at

    @property
    def readers(self) -> int:
        """How many hold the snapshot or wait for a chunk."""
        now = self._clock.now
        waiting = {reader for (reader, _), until in self._on_their_way.copy().items() if now < until}
        return len(waiting | {reader for reader, until in self._until.copy().items() if now < until})

    @property
    def claim(self) -> tuple[float, float]:
        """How strong the claim on the buffer is: of several leases the one with the lowest claim gives way. That is the
        one with the oldest progress. While all make progress it is the one that began last: else readers of two states
        would evict each other endlessly, and none would finish."""
        idle_s = self.idle_s
        return (-idle_s if idle_s > self._limits.lease_pause_s else 0.0, -self._began)

    def begin(self, reader: str) -> None:
        """Note the first request of a reader. Later calls change nothing."""
        now = self._clock.now
        if self._ends_at == float("-inf"):
            self._began = self._progress_at = now
            self._ends_at = time.monotonic() + self._limits.lease_max_s
        if len(self._until) < self._limits.lease_readers:
            self._until.setdefault(reader, now + self._limits.lease_pause_s)

    def upload(self, reader: str, index: int, size_bytes: int) -> None:
        """Note that a chunk is being sent to `reader`."""
        self.begin(reader)
        if reader not in self._until:
            return
        had = self._had.setdefault(reader, set())
        if index not in had:
            had.add(index)
            self._on_their_way[reader, index] = self._clock.now + size_bytes / self._limits.lease_rate

    def left(self, reader: str, index: int) -> None:
        """Note that the chunk has left. Takes no lock: the garbage collector may call this at any time."""
        now = self._clock.now
        if now < self._on_their_way.pop((reader, index), float("-inf")):
            self._progress_at = now
            whole = len(self._had[reader]) == self._chunks
            until = float("-inf") if whole else now + self._limits.lease_pause_s
            self._until[reader] = until if whole else max(self._until[reader], until)

    def end(self, reader: str) -> None:
        """Note that the reader has turned to another state."""
        if reader in self._until:
            self._until[reader] = float("-inf")
