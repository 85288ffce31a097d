"""The file of an arriving state: each verified chunk at its offset, holes elsewhere, resumable after any crash."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from peer.errors import ResourceError
from peer.files import fsync_path, is_full, make_folder, write_at
from swarm.state.chunk_scheduler import ChunkTree
from swarm.state.ranges import ByteRange, chunks_of, spans_of

_OPTION: Final = "with --home (of an export: --out)"


class PartFile:
    """Room at `path` for the chunks of a state that overlap `ranges`; by default for all. Every method blocks.

    No other file records which chunks are in it. Hashing them shows that, and is always right.
    """

    def __init__(self, path: Path, size_bytes: int, ranges: Sequence[ByteRange] | None = None) -> None:
        """Open or make the file and reserve the space of its chunks. Raises ResourceError."""
        self.path = path
        self.size_bytes = size_bytes
        self.chunks = frozenset(chunks_of(size_bytes, ((0, size_bytes),) if ranges is None else ranges))
        self._spans = spans_of(size_bytes, self.chunks)
        self._fd = -1
        existed = path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._fd).st_size > size_bytes:
                os.ftruncate(self._fd, size_bytes)
            self._reserve()
        except OSError as error:
            if existed and ranges is not None:
                self.close()  # other ranges in it may be in use
            else:
                self.discard()
            raise self._refused(error) from error

    @property
    def wanted_bytes(self) -> int:
        """The size of the chunks that overlap the ranges."""
        return sum(end - first for first, end in self._spans)

    def intact(self, tree: ChunkTree) -> set[int]:
        """Return the wanted chunks that are in the file already."""
        found = set()
        for index in self.chunks:
            start, end = tree.span(index)
            if tree.matches(index, os.pread(self._fd, end - start, start)):
                found.add(index)
        return found

    def store(self, tree: ChunkTree, index: int, data: memoryview) -> bool:
        """Write chunk `index` if its hash is that in `tree`; else write nothing and return False."""
        if not tree.matches(index, data):
            return False
        offset, _ = tree.span(index)
        try:
            write_at(self._fd, data, offset)
        except OSError as error:
            raise self._refused(error) from error
        return True

    def mapped(self) -> Tensor:
        """Return the whole file as flat fp32, mapped, also where its name is gone by now. Writing to it does not change
        the file."""
        return torch.frombuffer(mmap.mmap(self._fd, self.size_bytes, access=mmap.ACCESS_COPY), dtype=torch.float32)

    def close(self) -> None:
        """Keep the file for the next attempt."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def keep(self, path: Path) -> None:
        """Move the file to `path`, for good: bytes and entry are synced when this returns. Raises ResourceError."""
        try:
            os.fsync(self._fd)
            self.close()
            make_folder(path.parent)
            os.replace(self.path, path)
            fsync_path(path.parent)
        except OSError as error:
            raise self._refused(error) from error

    def discard(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            self.close()
            self.path.unlink(missing_ok=True)

    def _reserve(self) -> None:
        """Claim the space now: better to fail here than after an hour of receiving."""
        if hasattr(os, "posix_fallocate"):
            try:
                for first, end in self._spans:
                    os.posix_fallocate(self._fd, first, end - first)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise  # some systems and file systems cannot reserve
        if os.fstat(self._fd).st_size < self.size_bytes:
            os.ftruncate(self._fd, self.size_bytes)

    def _refused(self, error: OSError) -> ResourceError:
        if is_full(error):
            need = f"{(self.wanted_bytes >> 20) + 1} MiB are needed to receive the run's state"
            return ResourceError(
                f"the disk of {self.path.parent} is full, {need}: free some space, or choose another folder {_OPTION}"
            )
        return ResourceError(f"{self.path} cannot be written ({error.strerror}): choose a writable folder {_OPTION}")
