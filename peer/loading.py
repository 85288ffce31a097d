"""Progress of reading many bytes, reported by a bounded number of events.

Before a peer serves it reads, hashes, fetches and loads gigabytes. Each such phase is `loading_begun`, some
`loading_progress` and `loading_ended`, in this process or in a worker's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, Protocol

from peer.catalogue.happening import Happening
from peer.catalogue.serving import LoadingBegun, LoadingEnded, LoadingProgress

Phase = Literal["read", "check", "fetch", "load"]
"""read: a checkpoint that is founded, its values and hashes. check: the hashes of local files. fetch: weights from
other peers. load: into the worker."""
STEPS_MAX: Final = 200
"""Events of progress in one phase at most,"""
STEP_S: Final = 0.25
"""and none sooner after the one before."""


class EmitsEvents(Protocol):
    """Records an event: `EventLog.emit`, or a worker's `ControlLink.emit`."""

    def __call__(self, event: Happening, /) -> None: ...


class Loading:
    """The bytes of one phase that are done. Thread-safe."""

    def __init__(
        self, emit: EmitsEvents, phase: Phase, size_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit, self._phase, self._size_bytes, self._clock = emit, phase, size_bytes, clock
        self._done = self._told = 0
        self._told_at = clock()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Note that this many more bytes are done."""
        with self._lock:
            self._note(self._done + count)

    def reach(self, done_bytes: int) -> None:
        """Note that this many bytes are done in all."""
        with self._lock:
            self._note(done_bytes)

    def _note(self, done_bytes: int) -> None:
        self._done = done_bytes = min(done_bytes, self._size_bytes)
        now = self._clock()
        if now - self._told_at < STEP_S or (done_bytes - self._told) * STEPS_MAX < self._size_bytes:
            return
        self._told, self._told_at = done_bytes, now
        self._emit(LoadingProgress(phase=self._phase, done_bytes=done_bytes, size_bytes=self._size_bytes))


@contextmanager
def loading(emit: EmitsEvents, phase: Phase, size_bytes: int) -> Iterator[Loading]:
    """Report a phase, which is the block; its end is reported unless it fails."""
    began = time.monotonic()
    emit(LoadingBegun(phase=phase, size_bytes=size_bytes))
    yield Loading(emit, phase, size_bytes)
    emit(LoadingEnded(phase=phase, size_bytes=size_bytes, seconds=round(time.monotonic() - began, 3)))
