"""The memory that a process holds now, by kind, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> dict[str, int]:
    """Return the bytes of a process's memory: `RssAnon` (no file's: its heap), `RssFile` (mapped from files, libraries
    among them, which the kernel takes back when it must), `RssShmem` (shared with other processes)."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Rss"))
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in lines}
