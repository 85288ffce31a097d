"""Devices of a given speed: the compute workers of peers, each with a fixed share of one core.

Replicas that share two cores are together as fast as the cores, however many there are. A share of its own for each
makes their number matter. Needs root and the cpu controller of cgroup v1 or v2.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import trio

NAME: Final = "barnraise"
PERIOD_US: Final = 20_000
LOOK_S: Final = 0.2
V1: Final = Path("/sys/fs/cgroup/cpu")
V2: Final = Path("/sys/fs/cgroup")


def unavailable() -> str:
    """Return why there can be no such devices here; "" if there can."""
    if os.geteuid() != 0:
        return "only root may share out the cores"
    if (V1 / "cpu.cfs_quota_us").exists() or (V1 / "cpu.shares").exists():
        return "" if os.access(V1, os.W_OK) else f"{V1} is read-only"
    controllers = V2 / "cgroup.subtree_control"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return ""
    return "the kernel shares no cores out (no cpu controller of cgroups)"


@contextmanager
def open_devices(cores: float) -> Iterator[Devices]:
    """Open devices with that share of one core each. A process that outlives the block runs on, unlimited."""
    devices = Devices(cores)
    try:
        yield devices
    finally:
        devices.close()


class Devices:
    """Devices of equal speed; made by `open_devices`."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._root = V1 if (V1 / "cpu.shares").exists() else V2
        self._folders: dict[int, Path] = {}
        for left in self._root.glob(f"{NAME}-*"):
            with suppress(OSError):  # in use
                left.rmdir()  # of a run that was killed

    async def keep(self, workers: Callable[[], Iterable[int]]) -> None:
        """Confine each of these processes as soon as it exists (a peer that moves starts a new one), until
        cancelled."""
        while True:
            now = set(workers())
            for pid in now - self._folders.keys():
                self._confine(pid)
            for pid in self._folders.keys() - now:
                self._release(pid)
            await trio.sleep(LOOK_S)

    def close(self) -> None:
        for pid in list(self._folders):
            self._release(pid)

    def _confine(self, pid: int) -> None:
        folder = self._root / f"{NAME}-{uuid.uuid4().hex}"
        folder.mkdir()
        self._folders[pid] = folder
        quota_us = round(self._cores * PERIOD_US)
        if self._root is V1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        with suppress(ProcessLookupError):
            (folder / "cgroup.procs").write_text(str(pid))

    def _release(self, pid: int) -> None:
        folder = self._folders.pop(pid)
        for left in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (self._root / "cgroup.procs").write_text(left)
        with suppress(OSError):  # a process in it is just dying: the next `Devices` removes the folder
            folder.rmdir()
