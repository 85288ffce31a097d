"""Flat vectors that the network process and its compute workers both map: memory, or a file that memory only caches.

Neither has a name in any file system: a child process inherits its descriptor. So nothing is left behind in /dev/shm,
not even by SIGKILL, and a container's small /dev/shm is no limit.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from peer.errors import ResourceError
from peer.files import reserve
from peer.ipc.early_maps import mapped


class SharedBuffer:
    """`numel` values, zero at first, in `tensor` (1-D). A child process that inherits `fd` calls `attach`.

    `close` closes the descriptor. The memory lives as long as any process holds the tensor.
    """

    def __init__(self, fd: int, numel: int, dtype: torch.dtype = torch.float32) -> None:
        memory = mapped(fd)
        self.fd = fd if memory is None else -1
        self.numel = numel
        self.tensor: Tensor = torch.frombuffer(
            mmap.mmap(fd, numel * dtype.itemsize) if memory is None else memory, dtype=dtype, count=numel
        )

    @classmethod
    def create(
        cls, directory: Path, numel: int, dtype: torch.dtype = torch.float32, in_file: bool = False
    ) -> SharedBuffer:
        """Create the memory, or a file in `directory` that is unlinked at once. It is a file, too, if the system has no
        anonymous shared memory. A process that attaches to a file can cut it off, unless it was mapped by
        `peer.ipc.early_maps`. Raises ResourceError."""
        size = numel * dtype.itemsize
        fd = -1
        try:
            if in_file:
                fd = _file_of(directory, size)
                return cls(fd, numel, dtype)
            if sys.platform == "linux":
                fd = os.memfd_create("barnraise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            else:
                fd, path = tempfile.mkstemp(dir=directory)
                os.unlink(path)
            os.truncate(fd, size)
            if sys.platform == "linux":  # a worker that cut the memory off would end this process at its next read
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, numel, dtype)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if in_file:
                raise ResourceError(
                    f"cannot reserve {size >> 20} MiB in {directory} ({error.strerror}): free some space or choose"
                    " another --home"
                ) from error
            raise ResourceError(
                f"cannot map {size >> 20} MiB of shared memory ({error.strerror}): free memory or train a smaller model"
            ) from error

    @classmethod
    def attach(cls, fd: int, numel: int, dtype: torch.dtype = torch.float32) -> SharedBuffer:
        """Map the memory behind an inherited descriptor, which the buffer then owns."""
        return cls(fd, numel, dtype)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.tensor = torch.empty(0)


def _file_of(directory: Path, size_bytes: int) -> int:
    """Return the descriptor of a file without a name whose room is reserved. Raises OSError."""
    fd, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    try:
        reserve(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd
