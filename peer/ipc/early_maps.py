"""Vectors that a worker maps before it is confined. Then it closes their descriptors: through one it could cut off the
file that backs them, and the network process would end at its next read. Memory without a file is sealed against that.

Without torch, which a worker imports only once it is confined. Python's mmap keeps a descriptor of its own, so the call
is made by ctypes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

_FAILED: Final = ctypes.c_void_p(-1).value
_mapped: dict[int, ctypes.Array[ctypes.c_char]] = {}


def map_early(fd: int) -> None:
    """Map all of an inherited descriptor, and close it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = (ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
    libc.mmap.argtypes = (ctypes.c_void_p, *numbers)
    size = os.fstat(fd).st_size
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"{size >> 20} MiB of shared memory cannot be mapped")
    _mapped[fd] = (ctypes.c_char * size).from_address(address)
    os.close(fd)


def mapped(fd: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory that `map_early` mapped from this descriptor, until the process ends; else None."""
    return _mapped.get(fd)
