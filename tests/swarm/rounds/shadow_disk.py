"""What a disk keeps when the power fails: the bytes of files and the entries of folders that were synced, no more."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest


class ShadowDisk:
    """Notes each `os.fsync` of a folder's files and folders. `keep` gives the disk as it would be after a power cut."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root.resolve()
        self._files: dict[int, bytes] = {}  # by inode
        self._entries: dict[Path, dict[str, int]] = {self._root: {}}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def _note(self, fd: int) -> None:
        self._fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self._root not in (path, *path.parents):
            return
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._entries[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._files[status.st_ino] = os.pread(fd, status.st_size, 0) if _readable(fd) else path.read_bytes()

    def files(self) -> dict[Path, bytes]:
        """Return what would be there, by path below the root: a file whose bytes were not synced is empty."""
        found: dict[Path, bytes] = {}
        reached = [self._root]
        while reached:
            folder = reached.pop()
            for name, inode in self._entries.get(folder, {}).items():
                path = folder / name
                if path in self._entries or path.is_dir():
                    reached.append(path)
                else:
                    found[path.relative_to(self._root)] = self._files.get(inode, b"")
        return found


def _readable(fd: int) -> bool:
    with open(f"/proc/self/fdinfo/{fd}") as info:
        flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags"))
    return flags & os.O_ACCMODE != os.O_WRONLY


def put_back(files: dict[Path, bytes], root: Path) -> None:
    """Make a folder hold exactly these files."""
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
