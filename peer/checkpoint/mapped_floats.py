"""Flat fp32 vectors that lie in files: memory only caches them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import torch
from torch import Tensor

from peer.files import reserve

FLOAT_BYTES: Final = 4


def map_writable(fd: int, size_bytes: int) -> Tensor:
    """Return a file, the room of which is reserved, as a flat tensor. Writing to it changes the file."""
    return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.float32)


def map_floats(path: Path, size_bytes: int) -> Tensor:
    """Return a file as a flat tensor that is mapped, not read. Writing to it does not change the file."""
    return torch.from_file(str(path), shared=False, size=size_bytes // FLOAT_BYTES, dtype=torch.float32)


def floats_on_disk(folder: Path, sizes: Sequence[int]) -> list[Tensor]:
    """Return flat tensors of these sizes, zero at first, that lie in one file of `folder` without a name. Raises
    OSError, as `reserve`."""
    size_bytes = FLOAT_BYTES * sum(sizes)
    with TemporaryFile(dir=folder) as file:
        reserve(file.fileno(), size_bytes)
        return list(map_writable(file.fileno(), size_bytes).split(list(sizes)))
