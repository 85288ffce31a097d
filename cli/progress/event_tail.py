"""Follow a JSONL event stream that another process writes (`peer.events`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from peer.catalogue.reading import Heard, heard
from peer.decoding import MALFORMED

_CHUNK_BYTES: Final = 1 << 20
_LOGS: Final = ("events.1.jsonl", "events.jsonl")  # the older one first
_LOG_BYTES_MAX: Final = 64 << 20  # of each, which is what a peer writes before it rotates


class EventTail:
    """A reader of events as they are written.

    The file need not exist yet. A file that cannot be opened counts as missing: its writer reports the error. When the
    writer rotates the file, the rest of the old one is read before the new one. With `last_bytes` it begins so far
    before the end of what the file holds already.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self._path = path
        self._fd = self._open() if last_bytes is not None else None
        self._rest = b""
        if self._fd is not None and last_bytes is not None:
            with suppress(OSError):
                os.lseek(self._fd, max(0, os.fstat(self._fd).st_size - last_bytes), os.SEEK_SET)

    def poll(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yield (Unix time, name, fields) of each event since the last call."""
        while True:
            if self._fd is None:
                self._fd = self._open()
            if self._fd is None:
                return
            rotated = self._rotated()  # before reading: nothing is written to a file once it is rotated
            yield from self._read()
            if not rotated:
                return
            self.close()

    def heard(self) -> Iterator[Heard]:
        """Yield those of the catalogue."""
        for at, name, fields in self.poll():
            if (found := heard(at, name, fields)) is not None:
                yield found

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._rest = b""

    def _open(self) -> int | None:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has no writer to wait for
        except OSError:
            return None

    def _rotated(self) -> bool:
        assert self._fd is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._fd).st_ino
        except OSError:
            return False

    def _read(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        assert self._fd is not None
        while chunk := os.read(self._fd, _CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _CHUNK_BYTES:
                self._rest = b""  # no event is as long: the file is damaged
            for line in lines:
                try:
                    fields = msgspec.json.decode(line, type=dict[str, Any])
                    yield float(fields.pop("at")), str(fields.pop("event")), fields
                except (KeyError, TypeError, ValueError, OverflowError, *MALFORMED):
                    continue  # a line torn by a crash of its writer


def events_kept(home: Path) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Yield the events that the log in `home` still holds, of all sessions, oldest first; of a log beyond its usual
    size the last ones. What cannot be read is left out."""
    for log in _LOGS:
        tail = EventTail(home / log, _LOG_BYTES_MAX)
        try:
            with suppress(OSError):
                yield from tail.poll()
        finally:
            tail.close()
