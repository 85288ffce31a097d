"""A node's records on disk: one log that grows at its end, so that what is written together costs one sync.

An entry is a head of 24 bytes (the size of what follows, a check of that size, a check of what follows) and a key with
its record. A later entry of a key replaces the earlier one. A power cut can leave the last entries unfinished: they
were not reported, and do not count. Anything else that is wrong is damage, which the node must know.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from peer.decoding import MALFORMED
from peer.files import fsync_path, make_folder, read_bounded, unwritable, write_at
from swarm.protocol.agreement.records import BALLOT_KEY

LOG_NAME: Final = "records.log"
LOG_BYTES_MAX: Final = 1 << 30
REWRITTEN_MIN: Final = 4 << 20  # a log of fewer bytes is not rewritten
REWRITTEN_FACTOR: Final = 4  # a log is rewritten once it is so many times as long as what counts in it
_HEAD: Final = struct.Struct(">I4s16s")
_ENTRY: Final = msgspec.msgpack.Decoder(tuple[str, bytes])


class RecordFiles:
    """The records of one group's node, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOG_NAME
        self._live: dict[str, bytes] | None = None  # the last entry of each key; None while the log was not read
        self._bytes = 0

    def read(self) -> dict[str, bytes]:
        """Return all records, by key. Where some are damaged, that of the ballot is empty: votes may have been lost."""
        self._live, found = {}, dict[str, bytes]()
        self._bytes = 0
        try:
            log = read_bounded(self._path, LOG_BYTES_MAX) if self._path.exists() else b""
            for key, record, entry in entries_in(log):
                self._live[key], found[key] = entry, record
                self._bytes += len(entry)
        except (OSError, ValueError, *MALFORMED):
            found[BALLOT_KEY] = b""
        return found

    def write(self, records: Mapping[str, bytes]) -> None:
        """Put records on disk: file and folder are synced when this returns. Raises ResourceError."""
        try:
            if self._live is None:
                self.read()
            assert self._live is not None
            entries = {key: _entry(key, record) for key, record in records.items()}
            live = {**self._live, **entries}
            added = b"".join(entries.values())
            size = sum(map(len, live.values()))
            if self._bytes and self._bytes + len(added) <= max(REWRITTEN_MIN, REWRITTEN_FACTOR * size):
                self._append(added)
            else:
                self._rewrite(b"".join(live.values()))
            self._live = live
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def _append(self, added: bytes) -> None:
        fd = os.open(self._path, os.O_RDWR)
        try:
            if os.fstat(fd).st_size != self._bytes:  # what an earlier write has left unfinished
                os.ftruncate(fd, self._bytes)
            write_at(fd, memoryview(added), self._bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        self._bytes += len(added)

    def _rewrite(self, whole: bytes) -> None:
        make_folder(self._folder)
        fresh = self._folder / f"{LOG_NAME}.new"
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            write_at(fd, memoryview(whole), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, self._path)
        fsync_path(self._folder)
        self._bytes = len(whole)


def _entry(key: str, record: bytes) -> bytes:
    body = msgspec.msgpack.encode((key, record))
    size = len(body).to_bytes(4, "big")
    return _HEAD.pack(len(body), blake3(size).digest(4), blake3(body).digest(16)) + body


def entries_in(log: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield key, record and bytes of each entry. Raise ValueError where the log is damaged."""
    at = 0
    while at + _HEAD.size <= len(log):
        size, size_check, check = _HEAD.unpack_from(log, at)
        if size_check != blake3(size.to_bytes(4, "big")).digest(4):
            if any(log[at:]):
                raise ValueError("the head of an entry is damaged")
            return  # space that was never written
        end = at + _HEAD.size + size
        if end > len(log):
            return
        body = log[at + _HEAD.size : end]
        if check != blake3(body).digest(16):
            raise ValueError("an entry is damaged")
        key, record = _ENTRY.decode(body)
        yield key, record, log[at:end]
        at = end
