"""A control group of Linux whose processes together have so much memory, the files that it caches included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

GROUPS: Final = Path("/sys/fs/cgroup")
_GONE_S: Final = 10.0


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Callable[[], None]]:
    """Return what a new process calls to enter the group; of version 1 or 2, below this process's own. Raises OSError
    where this user may make none. The group is removed at the end, when its processes have ended."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of_kind = {kind: path for _, kinds, path in lines for kind in kinds.split(",")}
    is_old = "memory" in of_kind
    mine = GROUPS / "memory" if is_old else GROUPS
    group = (
        mine
        / of_kind.get("memory", of_kind.get("", "/")).lstrip("/")
        / f"barnraise-{os.getpid()}-{time.monotonic_ns()}"
    )
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(limit_bytes))
        yield lambda: _enter(group)
    finally:
        until = time.monotonic() + _GONE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        group.rmdir()


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
