"""The free memory of this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def free_memory_bytes() -> float:
    """Return the memory that a worker could get now, with reclaimable caches where the system reports them."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
