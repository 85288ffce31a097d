"""The cores and the memory that this process can use: the machine's, or what its control groups allow of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from peer.cgroup import ROOT, cpu_limit, memory_limit, smallest_memory_limit


def usable_cores(root: Path = ROOT) -> int:
    """Return the cores that this process may use, at least 1: in a container fewer than the machine has.

    Of a quota of CPU time only whole cores count: one thread more, and all are stopped for a part of each period, in
    which those that wait for each other wait for it. `root` is the folder that replaces `/`.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_limit(root)
    return allowed if quota is None else max(1, min(allowed, int(quota.cores)))


def free_memory_bytes(root: Path = ROOT) -> float:
    """Return the memory in bytes that a worker could get now, with reclaimable caches where the system reports them.

    `root` is the folder taken as `/`."""
    limit = memory_limit(root)
    return min(_free_on_machine(root), float("inf") if limit is None else float(limit.free_bytes))


def memory_bytes(root: Path = ROOT) -> float:
    """Return the memory in bytes that this process may ever use. Unlike what is free it is the same at every start.

    `root` is the folder taken as `/`."""
    limit = smallest_memory_limit(root)
    whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(whole, float("inf") if limit is None else float(limit))


def _free_on_machine(root: Path) -> float:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
