"""A peer that is slow: its processes, those of its worker among them, are stopped for most of the time, in bursts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

RUNS_S: Final = 0.01
STOPPED_S: Final = 0.19
"""Long against what it runs: on a machine with fewer cores than peers all get a fraction of one anyway."""
_FAMILY_S: Final = 1.0
"""How often its processes are looked up: a worker that died has a successor."""


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Inside the block slow down a process and those that it has started."""
    over = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(pid, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow_down(pid: int, over: threading.Event) -> None:
    family, looked_at = list[int](), 0.0
    try:
        while not over.wait(RUNS_S):
            if time.monotonic() > looked_at + _FAMILY_S:
                family, looked_at = [pid, *_descendants(pid)], time.monotonic()
            _signal(family, signal.SIGSTOP)
            over.wait(STOPPED_S)
            _signal(family, signal.SIGCONT)
    finally:
        _signal(family, signal.SIGCONT)


def _signal(family: list[int], number: signal.Signals) -> None:
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Return the processes that one has started, and those that these have; none on a system without `ps`, as in small
    containers: the peer is slow then, and its worker is not."""
    try:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]
