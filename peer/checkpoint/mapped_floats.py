"""Flat fp32 vectors that lie in files: memory only caches them."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import torch
from torch import Tensor

FLOAT_BYTES: Final = 4


def can_reserve() -> bool:
    """Return whether this system can reserve a file's room. macOS cannot."""
    return hasattr(os, "posix_fallocate")


def reserve(fd: int, size_bytes: int) -> None:
    """Reserve a file's room on the disk: with no room left, a write through a map would end the process. Raises OSError
    if there is none, or this system cannot reserve it."""
    if not can_reserve():
        raise OSError(errno.ENOTSUP, "this system cannot reserve room in a file")
    os.posix_fallocate(fd, 0, size_bytes)


def map_writable(fd: int, size_bytes: int) -> Tensor:
    """Return a file, the room of which is reserved, as a flat tensor. Writing to it changes the file."""
    return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.float32)


def map_floats(path: Path, size_bytes: int) -> Tensor:
    """Return a file as a flat tensor that is mapped, not read. Writing to it does not change the file."""
    return torch.from_file(str(path), shared=False, size=size_bytes // FLOAT_BYTES, dtype=torch.float32)


def floats_on_disk(folder: Path, sizes: Sequence[int]) -> list[Tensor]:
    """Return flat tensors of these sizes, not yet filled, that lie in one file of `folder` without a name. Raises
    OSError, as `reserve`."""
    size_bytes = FLOAT_BYTES * sum(sizes)
    with TemporaryFile(dir=folder) as file:
        reserve(file.fileno(), size_bytes)
        return list(map_writable(file.fileno(), size_bytes).split(list(sizes)))
