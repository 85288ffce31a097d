"""Opens the compiled kernels that an installation has built, where it had a compiler.

They compute what the torch code beside them computes, to the bit, in one pass over memory. So a machine without them is
only slower, and whether they are used is no part of a run.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

SWITCH: Final = "BARNRAISE_KERNELS"


def is_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def open_library(folder: Path, name: str) -> ctypes.CDLL | None:
    """Open the library that setuptools has built in a package's folder under that name; its functions run without the
    interpreter's lock. None if it is not there, does not load on this system, or BARNRAISE_KERNELS=0."""
    if is_switched_off():
        return None
    for path in (folder / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                return None
    return None
