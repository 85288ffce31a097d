"""Pages that came from other peers, a file each, up to a number of bytes: the least recently used one goes first.

The folder needs no list: names are the numbers of pages, and a file has its name only once all of it is written. What
an earlier process has left is checked by its hash at its first use.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from peer.data.pages.folder import PagePlace, fault_of, read_page
from peer.data.pages.index import PageIndex
from peer.files import is_full

_SUFFIX: Final = ".page"


class CachedPages:
    """The files of a cache, as its readers see them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, page: int) -> PagePlace | None:
        """Return where a page lies; None if it is not there."""
        path = self._folder / f"{page}{_SUFFIX}"
        return PagePlace(path, 0) if path.is_file() else None


class PageCache:
    """The cache of one data set. Its methods block, and run in one thread at a time."""

    def __init__(self, folder: Path, index: PageIndex, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Falls where the disk is full."""
        self._folder, self._index = folder, index
        self._held: OrderedDict[int, None] = OrderedDict()  # the least recently used one first
        self._unchecked: set[int] = set()

    def open(self) -> None:
        """Take over what an earlier process has left here, and remove the rest. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found = list[tuple[float, int]]()
        for entry in os.scandir(self._folder):
            stem, suffix = os.path.splitext(entry.name)
            number = int(stem) if stem.isdecimal() and len(stem) < 12 else -1
            is_page = suffix == _SUFFIX and 0 <= number < self._index.pages and str(number) == stem
            if is_page and entry.stat(follow_symlinks=False).st_size == self._index.page_bytes(number):
                found.append((entry.stat().st_mtime, number))
            elif entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        self._held = OrderedDict.fromkeys(page for _, page in sorted(found))
        self._unchecked = set(self._held)
        self._shrink(self.limit_bytes, ())

    @property
    def held(self) -> Collection[int]:
        """The pages that are there."""
        return self._held.keys()

    @property
    def held_bytes(self) -> int:
        return sum(map(self._index.page_bytes, self._held))

    def use(self, page: int) -> bool:
        """Whether a page is there and intact; it is then the one that was used last."""
        if page not in self._held:
            return False
        if page in self._unchecked and self.read(page) is None:
            return False
        self._held.move_to_end(page)
        return True

    def read(self, page: int) -> bytes | None:
        """Return a page, checked; None if it is not there any more. A damaged one is removed."""
        if page not in self._held:
            return None
        try:
            data = read_page(self._index, page, PagePlace(self._path(page), 0))
        except OSError:
            data = b""
        if fault_of(self._index, page, data):
            self._remove(page)
            return None
        self._unchecked.discard(page)
        return data

    def put(self, page: int, data: bytes | bytearray | memoryview, kept: Iterable[int] = ()) -> bool:
        """Write a page that is checked; of the others all but the `kept` ones may give way to it. Return whether there
        was room. On a full disk the limit falls to what is there. Raises OSError for a disk that fails."""
        pinned = {*kept, page}
        self._shrink(self.limit_bytes - len(data), pinned)
        if self.held_bytes + len(data) > self.limit_bytes:
            return False
        while True:
            try:
                self._write(page, data)
            except OSError as error:
                if not is_full(error):
                    raise
                self.limit_bytes = self.held_bytes
                if not self._shrink(self.limit_bytes - len(data), pinned):
                    return False
            else:
                self._held[page] = None
                self._held.move_to_end(page)
                return True

    def _write(self, page: int, data: bytes | bytearray | memoryview) -> None:
        path = self._path(page)
        partial = path.with_suffix(".part")
        try:
            with partial.open("wb", buffering=0) as file:
                view = memoryview(data)
                while len(view):
                    view = view[file.write(view) :]
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def _shrink(self, most_bytes: int, pinned: Collection[int]) -> bool:
        """Remove pages but the pinned ones until the rest takes at most that. Return whether one was removed."""
        over = self.held_bytes - most_bytes
        removed = False
        for page in self._removable(pinned):
            if over <= 0:
                break
            over -= self._index.page_bytes(page)
            self._remove(page)
            removed = True
        return removed

    def _removable(self, pinned: Collection[int]) -> Iterator[int]:
        return (page for page in [*self._held] if page not in pinned)

    def _remove(self, page: int) -> None:
        del self._held[page]
        self._unchecked.discard(page)
        with suppress(OSError):
            self._path(page).unlink(missing_ok=True)

    def _path(self, page: int) -> Path:
        return self._folder / f"{page}{_SUFFIX}"
