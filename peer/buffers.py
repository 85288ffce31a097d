"""Flat fp32 vectors that the network process and its compute workers both map.

The memory has no name in any file system: a child gets it as an inherited descriptor. So nothing can be left behind in
/dev/shm, not even by SIGKILL, and a container's small /dev/shm is no limit.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from peer.errors import ResourceError

_FLOAT_BYTES = 4


class SharedBuffer:
    """`numel` fp32 values, zero at first, in `tensor` (1-D). Pass `fd` to a child, which calls `attach`.

    `close` gives the descriptor back; the memory itself lives as long as any process still holds the tensor.
    """

    def __init__(self, fd: int, numel: int) -> None:
        self.fd = fd
        self.numel = numel
        self.tensor: Tensor = torch.frombuffer(mmap.mmap(fd, numel * _FLOAT_BYTES), dtype=torch.float32)

    @classmethod
    def create(cls, directory: Path, numel: int) -> SharedBuffer:
        """`directory` holds the (at once unlinked) file where the system has no anonymous shared memory."""
        size = numel * _FLOAT_BYTES
        fd = -1
        try:
            if sys.platform == "linux":
                fd = os.memfd_create("barnraise")
            else:
                fd, path = tempfile.mkstemp(dir=directory)
                os.unlink(path)
            os.truncate(fd, size)
            return cls(fd, numel)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ResourceError(
                f"cannot map {size >> 20} MiB of shared memory ({error.strerror}): free memory or train a smaller model"
            ) from error

    @classmethod
    def attach(cls, fd: int, numel: int) -> SharedBuffer:
        """Map the memory behind an inherited descriptor; takes the descriptor over."""
        return cls(fd, numel)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.tensor = torch.empty(0)
