"""A device or a machine that has no memory left for a step."""

from __future__ import annotations

from typing import Final

import torch

_SAID: Final = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "could not create a memory",
    "could not create a primitive\n",
)
"""By torch's allocator of the CPU, by C++, by MPS, and twice by oneDNN, which says "primitive descriptor" of what it
cannot do at all. CUDA's error has a type of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a computation says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in f"{error}\n" for said in _SAID)


def free_cached(device: torch.device) -> None:
    """Give what torch keeps for later tensors back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
