"""Events of a peer: one JSONL stream, read by the terminal view, the monitor and the tests.

An event is a name plus flat JSON-able fields. Names are `noun_verb` (`round_committed`, `peer_penalized`), so that a
reader can filter by prefix. Fields carry units in their names (`seconds`, `bytes_up`). The file is ASCII, and texts in
it are cut: what another peer wrote cannot begin a line, nor fill the disk with one."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from peer.catalogue.groups import PeerPenalized
from peer.catalogue.happening import Happening
from peer.errors import ResourceError
from peer.plain_text import json_line

_PENALTY_S: Final = 10.0  # between two lines about one peer
_STRANGER_LINES: Final = 20
_STRANGER_LINES_S: Final = 60.0
_PENALIZED_MAX: Final = 1024  # peers remembered

Field = str | int | float | bool | None | list[str] | dict[str, int] | dict[str, float]


class Event(msgspec.Struct, frozen=True):
    """One event."""

    at: float
    """Seconds since the Unix epoch."""
    name: str
    fields: dict[str, Field]


Watcher = Callable[[Event], None]
"""Takes an event in the thread that emits it, and returns soon."""


class EventLog:
    """Appends events to a file, one JSON object a line, and passes each to the subscribers. Thread-safe.

    The file rotates once (`events.jsonl` -> `events.1.jsonl`) when it exceeds `rotate_bytes`, so it cannot fill a disk.
    A failed write loses log lines, never a round, and no subscriber misses an event for it.
    """

    def __init__(self, path: Path | None = None, rotate_bytes: int = 64 << 20, watch: Watcher | None = None) -> None:
        """`watch` is the first subscriber. Raises ResourceError if `path` cannot be written."""
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._subscribers: list[Watcher] = [] if watch is None else [watch]
        self._torn = False  # the last write ended in the middle of a line
        self._lock = threading.Lock()
        self._fd: int | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = self._open()
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise ResourceError(
                        f"{path} is a link, and a log is written to no other place: remove it"
                    ) from error
                raise ResourceError(
                    f"{path} cannot be written ({error.strerror}): check who owns it, or choose another --home"
                ) from error

    def emit(self, event: str | Happening, /, **fields: Field) -> None:
        """Record an event now: one of the catalogue, or by name one that only this log has."""
        name, fields = (event, fields) if isinstance(event, str) else event.stream_form()
        emitted = Event(at=time.time(), name=name, fields=fields)
        line = json_line({"at": round(emitted.at, 3), "event": name, **fields}).encode() + b"\n"
        with self._lock:
            if self._fd is not None:
                self._append(line)
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            subscriber(emitted)

    def subscribe(self, subscriber: Watcher) -> None:
        """Call `subscriber` with every event from now on (in the emitting thread; it must return soon)."""
        with self._lock:
            self._subscribers.append(subscriber)

    @contextmanager
    def subscribed(self, subscriber: Watcher) -> Iterator[None]:
        """As `subscribe`, inside the block."""
        self.subscribe(subscriber)
        try:
            yield
        finally:
            with self._lock:
                self._subscribers.remove(subscriber)

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _open(self) -> int:
        assert self._path is not None
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def _append(self, line: bytes) -> None:
        assert self._fd is not None and self._path is not None
        try:
            line = b"\n" + line if self._torn else line  # readers skip the half line
            written = os.write(self._fd, line)  # one write a line, so that they never see one on a disk with room
            self._torn = written < len(line) if written else self._torn
            if os.fstat(self._fd).st_size > self._rotate_bytes:
                with suppress(FileNotFoundError):  # an earlier rename succeeded, and the new file could not be opened
                    os.replace(self._path, self._path.with_suffix(".1.jsonl"))
                fresh = self._open()  # before the old one is closed, so that its number cannot be reused
                os.close(self._fd)
                self._fd = fresh
        except OSError:
            pass  # a full disk must not end training; the checkpoint writer reports it to the user


class _Penalties:
    """The next content of one peer's line."""

    def __init__(self) -> None:
        self.told_at = -math.inf
        self.untold = 0


class PenaltyLog:
    """The `peer_penalized` events of one host: of each peer at once the first, then one in 10 s with the `count` since
    the last. Untrusted peers together get 20 lines a minute, so that a flood pushes no history out of the log."""

    def __init__(
        self, events: EventLog, is_trusted: Callable[[str], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self._is_trusted = is_trusted
        self._clock = clock
        self._peers: OrderedDict[str, _Penalties] = OrderedDict()
        self._told: deque[float] = deque(maxlen=_STRANGER_LINES)

    def note(self, peer: str, reason: str) -> None:
        """Record that `peer` broke the protocol."""
        now, trusted = self._clock(), self._is_trusted(peer)
        known = self._peers.setdefault(peer, _Penalties())
        self._peers.move_to_end(peer)
        if len(self._peers) > _PENALIZED_MAX:
            self._peers.popitem(last=False)
        known.untold += 1
        crowded = not trusted and len(self._told) == _STRANGER_LINES and now - self._told[0] < _STRANGER_LINES_S
        if crowded or now - known.told_at < _PENALTY_S:
            return
        if not trusted:
            self._told.append(now)
        count, known.told_at, known.untold = known.untold, now, 0
        self._events.emit(PeerPenalized(peer=peer, reason=reason, count=count))
