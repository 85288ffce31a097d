"""Where pages lie: in the files of a folder that `peer data build` has written.

    index.msgpack  tokenizer.json  train-00000.pages  train-00001.pages ...  held-out-00000.pages ...

A file holds as many whole pages as fit into `FILE_BYTES_MAX`. Its name follows from the number of its pages: an index
names no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from peer.config import PagesConfig
from peer.data.pages.index import INDEX_BYTES_MAX, PageIndex, read_index
from peer.errors import ConfigError
from peer.files import read_bounded

INDEX: Final = "index.msgpack"
TOKENIZER: Final = "tokenizer.json"
FILE_BYTES_MAX: Final = 256 << 20


class PagePlace(NamedTuple):
    """Where a page begins."""

    path: Path
    offset: int


class Pages(Protocol):
    """Pages on this machine's disk."""

    def find(self, page: int) -> PagePlace | None:
        """Return where a page lies; None if it is not there."""
        ...


@dataclass(frozen=True)
class BuiltPages:
    """All pages of a data set, in a folder."""

    folder: Path
    index: PageIndex

    @classmethod
    def open(cls, folder: Path, wanted: PagesConfig | None = None) -> BuiltPages:
        """Read the index and look at the sizes of all files. Raises ConfigError; also for another data set than
        `wanted`."""
        built = cls(folder, load_index(folder / INDEX, wanted))
        for file, size_bytes in built.files():
            found = file.stat().st_size if file.is_file() else -1
            if found != size_bytes:
                is_there = "is missing" if found < 0 else f"has {found} bytes instead of {size_bytes}"
                raise ConfigError(f"{file} {is_there}: copy the folder again, or build it again")
        return built

    def files(self) -> Iterator[tuple[Path, int]]:
        """Yield each file of pages, and its size."""
        index = self.index
        for first, pages in ((0, index.train.pages), (index.train.pages, index.held_out.pages)):
            for at in range(first, first + pages, pages_a_file(index)):
                last = min(at + pages_a_file(index), first + pages)
                size_bytes = (last - at - 1) * index.page_windows * index.row_bytes + index.page_bytes(last - 1)
                yield self.find(at).path, size_bytes

    def find(self, page: int) -> PagePlace:
        """Return where a page lies."""
        index = self.index
        is_train = page < index.train.pages
        file, at = divmod(page if is_train else page - index.train.pages, pages_a_file(index))
        return PagePlace(self.folder / file_name(file, is_train), at * index.page_windows * index.row_bytes)

    def damaged(self, looked_at: Callable[[int], None] = lambda size_bytes: None) -> Iterator[tuple[int, str]]:
        """Read all pages; yield the number of each that is not what the index names, and why. `looked_at` is called
        with the size of each."""
        for page in range(self.index.pages):
            if reason := fault_of(self.index, page, read_page(self.index, page, self.find(page))):
                yield page, reason
            looked_at(self.index.page_bytes(page))


def load_index(path: Path, wanted: PagesConfig | None = None) -> PageIndex:
    """Read an index from its file. Raises ConfigError; also for that of another data set than `wanted`."""
    try:
        encoded = read_bounded(path, INDEX_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): name a folder that `peer data build` has written"
        ) from error
    return read_index(encoded, str(path), wanted)


def file_name(number: int, is_train: bool) -> str:
    """Return the name of a file of pages."""
    return f"{'train' if is_train else 'held-out'}-{number:05}.pages"


def pages_a_file(index: PageIndex) -> int:
    """Return how many pages a file holds."""
    return FILE_BYTES_MAX // (index.page_windows * index.row_bytes)


def read_page(index: PageIndex, page: int, place: PagePlace) -> bytes:
    """Return the bytes of a page, fewer where the file ends before. Raises OSError."""
    return read_at(place, 0, index.page_bytes(page))


def read_at(place: PagePlace, offset: int, size_bytes: int) -> bytes:
    """Return bytes of a page from an offset in it, fewer where the file ends before. Raises OSError."""
    with place.path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size_bytes, place.offset + offset)


def fault_of(index: PageIndex, page: int, data: bytes | bytearray | memoryview) -> str:
    """Return why `data` cannot be trained on as that page; "" if it can."""
    if not index.matches(page, data):
        return f"is not the page {page} of the data set: its hash is another"
    try:
        index.ids(data)
    except ValueError as error:
        return f"is page {page}, of which {error}"
    return ""
