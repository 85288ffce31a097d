"""How many threads of this process can compute at once."""

from __future__ import annotations

import os
from pathlib import Path

from peer.cgroup import ROOT, cpu_limit


def usable_cores(root: Path = ROOT) -> int:
    """Return the cores that this process may use, at least 1: in a container fewer than the machine has.

    Of a quota of CPU time only whole cores count: one thread more, and all are stopped for a part of each period, in
    which those that wait for each other wait for it. `root` is the folder that replaces `/`.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_limit(root)
    return allowed if quota is None else max(1, min(allowed, int(quota.cores)))
