"""All pages of a data set that this machine has: a folder that its user has named, and the cache beside it.

Its methods block, and may be called from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from peer.config import PagesConfig
from peer.data.pages.cache import PageCache
from peer.data.pages.folder import BuiltPages, fault_of, read_page
from peer.data.pages.index import PageIndex


class PageLibrary:
    """The pages here. One is used or given to others only once its hash was compared."""

    def __init__(self, index: PageIndex, cache: PageCache, built: BuiltPages | None) -> None:
        self.index, self.cache = index, cache
        self.wanted: Final[PagesConfig] = index.config
        self.damaged: dict[int, Path] = {}
        """Pages of the folder that are not what the index names."""
        self._built = built
        self._checked = set[int]()  # pages of the folder
        self._one = threading.Lock()

    def __contains__(self, page: int) -> bool:
        """Whether a page is here, as far as is known. It does not block."""
        return page in self.cache.held or (self._built is not None and page not in self.damaged)

    @property
    def held(self) -> Collection[int]:
        """The pages here, as far as is known. It does not block."""
        return range(self.index.pages) if self.has_all else {*self.cache.held}

    @property
    def has_all(self) -> bool:
        """Whether its user has named a folder with all pages."""
        return self._built is not None and not self.damaged

    def use(self, page: int) -> bool:
        """Whether a page is here and intact; it is then the one that was used last."""
        with self._one:
            return self.cache.use(page) or page in self._checked or self._from_folder(page) is not None

    def read(self, page: int) -> bytes | None:
        """Return a page, checked; None if it is not here."""
        with self._one:
            found = self.cache.read(page)
            return self._from_folder(page) if found is None else found

    def put(self, page: int, data: bytes | bytearray | memoryview, kept: Iterable[int] = ()) -> bool:
        """Keep a page that is checked, as `PageCache.put`."""
        with self._one:
            return self.cache.put(page, data, kept)

    def _from_folder(self, page: int) -> bytes | None:
        if self._built is None or page in self.damaged:
            return None
        place = self._built.find(page)
        try:
            data = read_page(self.index, page, place)
        except OSError:
            data = b""
        if fault_of(self.index, page, data):
            self.damaged[page] = place.path
            self._checked.discard(page)
            return None
        self._checked.add(page)
        return data
