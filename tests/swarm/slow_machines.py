"""Machines of a given speed: processes that get a fixed share of one core, and whatever they start with them.

Replicas that share two cores are as fast as the cores, however many of them there are; so that one replica more or less
makes a difference, each gets a machine of its own. Needs root and the cpu controller of cgroup v1 or v2.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PERIOD_US: Final = 20_000
V1: Final = Path("/sys/fs/cgroup/cpu")
V2: Final = Path("/sys/fs/cgroup")


def unavailable() -> str:
    """Why there can be no such machines here; "" if there can."""
    if os.geteuid() != 0:
        return "only root may share out the cores"
    if (V1 / "cpu.cfs_quota_us").exists() or (V1 / "cpu.shares").exists():
        return "" if os.access(V1, os.W_OK) else f"{V1} is read-only"
    controllers = V2 / "cgroup.subtree_control"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return ""
    return "the kernel shares no cores out (no cpu controller of cgroups)"


@contextmanager
def open_machines(cores: float) -> Iterator[Machines]:
    """Each has that share of one core. They are gone with the block; what still runs there then runs on."""
    machines = Machines(cores)
    try:
        yield machines
    finally:
        machines.close()


class Machines:
    """Made by `open_machines`."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._root = V1 if (V1 / "cpu.shares").exists() else V2
        self._folders: list[Path] = []

    def confine(self, *pids: int) -> None:
        """A machine for these processes and what they will start."""
        folder = self._root / f"barnraise-{uuid.uuid4().hex}"
        folder.mkdir()
        self._folders.append(folder)
        quota_us = round(self._cores * PERIOD_US)
        if self._root is V1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        for folder in self._folders:
            for pid in (folder / "cgroup.procs").read_text().split():
                (self._root / "cgroup.procs").write_text(pid)
            folder.rmdir()
        self._folders.clear()
