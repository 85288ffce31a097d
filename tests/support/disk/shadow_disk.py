"""What a disk keeps when the power fails: the bytes of files and the entries of folders that were synced, no more."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

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


@dataclass(frozen=True)
class Moment:
    """What the disk surely has, what was written, and the last round that was told of by then."""

    synced: dict[Path, bytes]
    written: dict[Path, bytes]
    told: int = 0

    def after_a_cut(self, random: Random, share: float | None = None) -> dict[Path, bytes]:
        """Return what is there after a cut: all that was synced, and of the rest nothing, all, or a drawn part (with a
        share of 0, 1 or between), of files a drawn beginning. What was removed may be there still."""
        share = random.choice((0.0, 0.5, 1.0)) if share is None else share
        there = {p: data for p, data in self.synced.items() if p in self.written or random.random() >= share}
        for path, data in self.written.items():
            if share == 1.0:  # a process that was killed
                there[path] = data
            elif random.random() < share and data.startswith(there.get(path, b"")):  # also of what was added to it
                sure = len(there.get(path, b""))
                there[path] = data[: sure + random.randrange(len(data) - sure + 1)]
        return there


class WatchedDisk(ShadowDisk):
    """A folder whose disk is looked at after each sync, rename, link, removal and write at a place."""

    def __init__(self, root: Path, patches: pytest.MonkeyPatch) -> None:
        super().__init__(root, patches)
        self.moments, self.told = list[Moment](), 0
        self._same, self._lock = dict[bytes, bytes](), threading.RLock()
        self._moving = (os.rename, os.replace)
        for name in ("rename", "replace", "link", "unlink", "pwrite"):
            patches.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: Callable[..., object]) -> Callable[..., object]:
        def watched(*arguments: Any, **options: Any) -> object:
            with self._lock:
                done = call(*arguments, **options)
                if call in self._moving:
                    before, after = Path(arguments[0]).resolve(), Path(arguments[1]).resolve()
                    for folder in [one for one in self._entries if before in (one, *one.parents)]:
                        self._entries[after / folder.relative_to(before)] = self._entries.pop(folder)
                self._look()
                return done

        return watched

    def _note(self, fd: int) -> None:
        with self._lock:
            super()._note(fd)
            self._look()

    def _look(self) -> None:
        written = {}
        for path in self._root.rglob("*"):
            with suppress(OSError):  # another thread has removed it meanwhile
                if path.is_file():
                    written[path.relative_to(self._root)] = self._one(path.read_bytes())
        synced = {path: self._one(data) for path, data in self.files().items()}
        self.moments.append(Moment(synced, written, self.told))

    def _one(self, data: bytes) -> bytes:
        """Return the first of equal bytes: most files are the same at most moments."""
        return self._same.setdefault(data, data)


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
