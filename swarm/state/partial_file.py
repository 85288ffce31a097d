"""A state that is still arriving, in one file: each verified chunk at its place, resumable after any
crash."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from peer.checkpoint.hash_tree import StateTree
from peer.errors import ResourceError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FLOAT_BYTES: Final = 4
_OPTION: Final = "with --home (of an export: --out)"


class PartFile:
    """Room for `size_bytes` at `path`. Every method blocks: call them in threads.

    Nothing beside the file says which chunks are in it; hashing it again does, and cannot lie.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open or make the file and reserve all its space at once; ResourceError names the remedy."""
        self.path = path
        self.size_bytes = size_bytes
        self._fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(self._fd).st_size > size_bytes:
                os.ftruncate(self._fd, size_bytes)
            self._reserve()
        except OSError as error:
            self.discard()
            raise self._refused(error) from error

    def intact(self, tree: StateTree) -> set[int]:
        """The chunks of `tree` that are in the file already."""
        found = set()
        for index in range(len(tree.hashes)):
            start, end = tree.span(index)
            if tree.matches(index, os.pread(self._fd, end - start, start)):
                found.add(index)
        return found

    def store(self, tree: StateTree, index: int, data: memoryview) -> bool:
        """Write chunk `index` if it is what `tree` says, else answer False and write nothing."""
        if not tree.matches(index, data):
            return False
        offset, _ = tree.span(index)
        try:
            while data.nbytes:
                written = os.pwrite(self._fd, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise self._refused(error) from error
        return True

    def load(self) -> Tensor:
        """All of it as flat fp32."""
        flat = torch.empty(self.size_bytes // _FLOAT_BYTES)
        view = memoryview(flat.numpy().view("u1").data)
        offset = 0
        while offset < self.size_bytes:
            count = os.preadv(self._fd, [view[offset : offset + (64 << 20)]], offset)
            if count == 0:
                raise ResourceError(f"{self.path} was cut short by another program: try again.")
            offset += count
        return flat

    def close(self) -> None:
        """Keep what is there for the next attempt."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            self.close()
            self.path.unlink(missing_ok=True)

    def _reserve(self) -> None:
        """Claim the space now: better to fail here than after an hour of receiving."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, self.size_bytes)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        os.ftruncate(self._fd, self.size_bytes)  # some systems and file systems cannot reserve

    def _refused(self, error: OSError) -> ResourceError:
        if error.errno in _FULL:
            need = f"{(self.size_bytes >> 20) + 1} MiB are needed to receive the run's state"
            return ResourceError(
                f"The disk of {self.path.parent} is full, {need}: free some space, or choose another folder {_OPTION}."
            )
        return ResourceError(f"{self.path} cannot be written ({error.strerror}): choose a writable folder {_OPTION}.")
