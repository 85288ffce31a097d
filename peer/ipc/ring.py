"""A ring of records between two processes: one writes, one reads, and neither waits for a lock or a thread.

The records lie in shared memory. A pipe has a byte for each record that has come: it is what the reader sleeps on, and
what makes the writer's bytes visible before their number is.

    record    u32 bytes | the bytes, padded to 8
"""

from __future__ import annotations

import os
import select
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from peer.errors import WorkerError
from peer.ipc.shared_memory import SharedBuffer

_SIZE: Final = struct.Struct("=I")
_PLACE: Final = struct.Struct("=Q")
_HEADER_BYTES: Final = 64  # the reader's place, alone in its cache line
_COUNT_MAX: Final = 1 << 16
_SKIP: Final = 0xFFFF_FFFF  # the rest of the ring is empty: the next record is at its beginning

Piece = bytes | bytearray | memoryview


class Ring:
    """One end of a ring. `put` at the writer's, `take` and `done` at the reader's."""

    def __init__(self, buffer: SharedBuffer, came_fd: int, put_fd: int) -> None:
        self.fds: Final = (buffer.fd, came_fd, put_fd)
        """For a child process to inherit: the memory, and the pipe's ends. The reader waits until the second is
        readable."""
        self.size_bytes: Final = buffer.numel - _HEADER_BYTES
        self._buffer, self._came, self._put = buffer, came_fd, put_fd
        os.set_blocking(came_fd, False)
        os.set_blocking(put_fd, False)
        array: Any = buffer.tensor.numpy()
        memory = memoryview(array)
        self._place, self._room = memory[:_HEADER_BYTES], memory[_HEADER_BYTES:]
        self._written = self._read = 0  # bytes since the beginning, at this end

    @classmethod
    def create(cls, directory: Path, size_bytes: int) -> Ring:
        """Create a ring for records of up to half of `size_bytes`. Raises ResourceError."""
        buffer = SharedBuffer.create(directory, _HEADER_BYTES + -(-size_bytes // 8) * 8, torch.uint8)
        return cls(buffer, *os.pipe())

    @classmethod
    def attach(cls, fds: tuple[int, int, int], size_bytes: int) -> Ring:
        """Return the other end of a ring, from inherited descriptors."""
        memory_fd, came_fd, put_fd = fds
        buffer = SharedBuffer.attach(memory_fd, _HEADER_BYTES + -(-size_bytes // 8) * 8, torch.uint8)
        return cls(buffer, came_fd, put_fd)

    def close(self) -> None:
        """Close the descriptors."""
        self._place.release()
        self._room.release()
        self._buffer.close()
        os.close(self._came)
        os.close(self._put)

    # -- the writer ----------------------------------------------------------------------------------------------------

    def put(self, *pieces: Piece) -> bool:
        """Write one record, the pieces one after the other. Return False if there is no room for it now. Raises
        ValueError for one that never fits."""
        size = sum(map(len, pieces))
        needed = _stretch(size)
        if needed > self.size_bytes // 2:
            raise ValueError(f"a record of {size} bytes does not fit into a ring of {self.size_bytes}")
        at = self._written % self.size_bytes
        skipped = self.size_bytes - at if at + needed > self.size_bytes else 0
        (read,) = _PLACE.unpack_from(self._place)
        if self._written + skipped + needed - read > self.size_bytes:
            return False
        if skipped:
            _SIZE.pack_into(self._room, at, _SKIP)
            at = 0
        _SIZE.pack_into(self._room, at, size)
        at += _SIZE.size
        for piece in pieces:
            self._room[at : at + len(piece)] = piece
            at += len(piece)
        try:
            os.write(self._put, b"\0")
        except BlockingIOError:  # more records than a pipe has room for: the reader is far behind
            return False
        self._written += skipped + needed
        return True

    # -- the reader ----------------------------------------------------------------------------------------------------

    def take(self, block: bool = False) -> list[memoryview]:
        """Return the records that have come; they are valid until `done`. `block`: wait for one. Raises WorkerError if
        the writer has broken the ring."""
        found = []
        for _ in range(self._count(block)):
            at = self._read % self.size_bytes
            size = self._size_at(at)
            if size == _SKIP:
                self._read, at = self._read + self.size_bytes - at, 0
                size = self._size_at(at)
            needed = _stretch(size)
            if needed > self.size_bytes // 2 or at + needed > self.size_bytes:
                raise WorkerError(f"a ring holds a record of {size} bytes: its writer is broken")
            found.append(self._room[at + _SIZE.size : at + _SIZE.size + size])
            self._read += needed
        return found

    def _size_at(self, at: int) -> int:
        return int(_SIZE.unpack_from(self._room, at)[0])

    def _count(self, block: bool) -> int:
        """Return how many records have come since the last call."""
        if block:
            select.select([self._came], [], [])
        with suppress(BlockingIOError):
            return len(os.read(self._came, _COUNT_MAX))
        return 0

    def done(self) -> None:
        """Give the room of all records that were taken back to the writer."""
        _PLACE.pack_into(self._place, 0, self._read)


def _stretch(size: int) -> int:
    return -(-(_SIZE.size + size) // 8) * 8
