"""Limits by the control groups of this process: memory and CPU time, in a container or a unit of systemd.

Both versions are read, in any nesting: the smallest limit of a group and all above it counts. `root` is the folder that
replaces `/`, so that made-up trees can be read. An unreadable limit counts as none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_UNLIMITED: Final = 1 << 60  # version 1 writes a number near 2^63 for no limit
_DIGITS_MAX: Final = 20
_TREE: Final = "sys/fs/cgroup"


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of one group, sizes in bytes."""

    limit_bytes: int
    free_bytes: int
    """The rest of it, with the cache of files that were read once, which the kernel drops first."""
    path: str
    """The file that sets it."""


@dataclass(frozen=True)
class CpuLimit:
    """The CPU time of one group."""

    cores: float
    """Seconds of CPU time a second."""
    path: str
    """The file that sets it."""


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the limit with the least left; None without one."""
    return min(_memory_limits(root), key=lambda limit: limit.free_bytes, default=None)


def smallest_memory_limit(root: Path = ROOT) -> int | None:
    """Return the smallest limit in bytes, however much of it is left; None without one."""
    return min((limit.limit_bytes for limit in _memory_limits(root)), default=None)


def _memory_limits(root: Path) -> list[MemoryLimit]:
    return [
        limit
        for folder in _groups(root, "memory")
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),  # above it a process is slowed down until it stands
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        if (limit := _memory_limit(root, folder, *names)) is not None
    ]


def cpu_limit(root: Path = ROOT) -> CpuLimit | None:
    """Return the smallest quota of CPU time; None without one."""
    found = [limit for folder in _groups(root, "cpu") if (limit := _cpu_limit(root, folder)) is not None]
    return min(found, key=lambda limit: limit.cores, default=None)


def _memory_limit(root: Path, folder: Path, limit: str, usage: str, cache: str) -> MemoryLimit | None:
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or most >= _UNLIMITED:
        return None
    taken = (used or 0) - _statistic(folder / "memory.stat", cache)
    return MemoryLimit(most, max(0, most - max(0, taken)), _shown(root, folder / limit))


def _cpu_limit(root: Path, folder: Path) -> CpuLimit | None:
    quota = _words(folder / "cpu.max")  # version 2: "50000 100000", or "max 100000"
    path = folder / "cpu.max"
    if not quota:
        path = folder / "cpu.cfs_quota_us"  # version 1: -1 for no limit
        quota = _words(path) + _words(folder / "cpu.cfs_period_us")
    with suppress(ValueError):
        time_us, period_us = map(int, quota)
        if time_us > 0 and period_us > 0:
            return CpuLimit(time_us / period_us, _shown(root, path))
    return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups with a controller, each before the one above it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        for mount, shown in _mounts(root, controllers):
            # A container may see its own group, or one above, in the place of the whole tree's top.
            inside = group.removeprefix(shown.rstrip("/")) if _is_within(group, shown) else ""
            folder = mount / inside.strip("/")
            while folder != mount and mount in folder.parents:
                yield folder
                folder = folder.parent
            yield mount


def _mounts(root: Path, controllers: str) -> list[tuple[Path, str]]:
    """Return where the tree of these controllers ("" for version 2) is mounted, and which group is its top there."""
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        words, kinds = fields.split(" "), kind.split(" ")
        wanted = kinds[0] == ("cgroup" if controllers else "cgroup2") and len(words) > 4
        if wanted and (not controllers or set(controllers.split(",")) <= set(kinds[-1].split(","))):
            found.append((root / words[4].lstrip("/"), words[3]))
    if found:
        return found
    names = ["", "unified"] if not controllers else [controllers, *controllers.split(",")]
    return [(root / _TREE / name, "/") for name in names if (root / _TREE / name).is_dir()]


def _is_within(group: str, top: str) -> bool:
    return top == "/" or group == top or group.startswith(top + "/")


def _statistic(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal() and len(value) <= _DIGITS_MAX:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() and len(words[0]) <= _DIGITS_MAX else None


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _lines(path: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return path.read_text(errors="replace").splitlines()
    return []


def _shown(root: Path, path: Path) -> str:
    return f"/{path.relative_to(root)}"
