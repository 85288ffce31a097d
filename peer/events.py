"""Typed facts a peer emits: one JSONL stream a peer, read by the terminal view, the monitor and the tests.

An event is a name plus flat JSON-able fields. Names are `noun_verb` (`round_committed`, `peer_penalized`), so that a
reader filters by prefix; fields carry units in their names (`seconds`, `bytes_up`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from peer.errors import ResourceError

Field = str | int | float | bool | None | list[str] | dict[str, int] | dict[str, float]


class Event(msgspec.Struct, frozen=True):
    """One fact: `at` is seconds since the Unix epoch, `name` its kind, `fields` its particulars."""

    at: float
    name: str
    fields: dict[str, Field]


class EventLog:
    """Appends events to a file, one JSON object a line, and hands each to the subscribers. Thread-safe.

    The file rotates once (`events.jsonl` -> `events.1.jsonl`) when it passes `rotate_bytes`, so it cannot fill a disk.
    A disk that refuses the write loses log lines, never a round.
    """

    def __init__(self, path: Path | None = None, rotate_bytes: int = 64 << 20) -> None:
        """ResourceError if `path` cannot be written."""
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._subscribers: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._fd: int | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = self._open()
            except OSError as error:
                raise ResourceError(
                    f"{path} cannot be written ({error.strerror}): check who owns it, or choose another --home."
                ) from error

    def emit(self, name: str, /, **fields: Field) -> None:
        """Record one fact now."""
        event = Event(at=time.time(), name=name, fields=fields)
        line = self._encoder.encode({"at": round(event.at, 3), "event": name, **fields}) + b"\n"
        with self._lock:
            if self._fd is not None:
                self._append(line)
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            subscriber(event)

    @contextmanager
    def subscribed(self, subscriber: Callable[[Event], None]) -> Iterator[None]:
        """Call `subscriber` with every event inside the block (in the emitting thread: be quick)."""
        with self._lock:
            self._subscribers.append(subscriber)
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
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _append(self, line: bytes) -> None:
        assert self._fd is not None and self._path is not None
        try:
            os.write(self._fd, line)  # one write of one line: readers never see half an event
            if os.fstat(self._fd).st_size > self._rotate_bytes:
                with suppress(FileNotFoundError):  # renamed already, where no new file could be opened then
                    os.replace(self._path, self._path.with_suffix(".1.jsonl"))
                fresh = self._open()  # before the old one is closed: its number would soon be somebody else's
                os.close(self._fd)
                self._fd = fresh
        except OSError:
            pass  # a full disk must not end training; the checkpoint writer reports it to the user
