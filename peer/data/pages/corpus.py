"""Samples from the pages of a data set. A sample's number means the same tokens on every machine.

An epoch takes the pages in the order of a keyed permutation, and the windows of each in another; the last page, which
is shorter, comes last. So a range of numbers touches few pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from peer.config import PagesConfig
from peer.corpus_facts import CorpusFacts
from peer.data.pages.cache import CachedPages
from peer.data.pages.folder import INDEX, BuiltPages, Pages, load_index, read_at
from peer.data.pages.index import PageIndex, check_vocabulary
from peer.data.permute import permute
from peer.errors import ConfigError
from peer.figures import several


def open_corpus(index_file: Path, wanted: PagesConfig, vocab_size: int, places: Sequence[Path]) -> PagedCorpus:
    """Return the corpus of the data set `wanted`. `places`: folders of cached pages, or with an index of built ones,
    the first before the others. Raises ConfigError."""
    index = load_index(index_file, wanted)
    check_vocabulary(index, vocab_size)
    pages: list[Pages] = [
        BuiltPages(folder, index) if (folder / INDEX).is_file() else CachedPages(folder) for folder in places
    ]
    return PagedCorpus(index, wanted.root, pages)


PAGES_MAX: Final = 1024


class PagedCorpus:
    """A corpus whose pages lie in one of several places. A page is not looked for before a sample of it is read."""

    def __init__(self, index: PageIndex, root: str, places: Sequence[Pages]) -> None:
        self.index, self.digest = index, bytes.fromhex(root)
        self.seq_len = index.seq_len
        self.facts = facts_of(index, root)
        self._places = places

    @property
    def has_marks(self) -> bool:
        """Whether some tokens do not count in the loss: a batch holds such a token as -1 - id."""
        return self.index.masked

    @property
    def windows(self) -> int:
        """The number of samples in one epoch."""
        return self.index.train.windows

    @property
    def bytes_per_token(self) -> float:
        """The ratio in the held-out text, which converts a loss in nats a token to nats a byte."""
        return self.facts.held_out_bytes / self.facts.held_out_tokens

    def batch(self, numbers: list[int], seed: int) -> Tensor:
        """Return the samples with these numbers, (B, seq_len + 1) int64. Raises ConfigError for a page that is not
        there, or holds an id outside the vocabulary."""
        return self._tensor([place_of(self.index, number, seed) for number in numbers])

    def held_out_batches(self, batch_size: int, max_batches: int) -> Iterator[Tensor]:
        """Yield at most `max_batches` batches of windows, spread evenly over the first held-out page: its documents are
        as random a choice as those of all. The same on every call."""
        page = self.index.train.pages
        windows = self.index.rows(page)
        count = min(windows, batch_size * max_batches)
        rows = [(page, at * windows // count) for at in range(count)]
        for at in range(0, count, batch_size):
            yield self._tensor(rows[at : at + batch_size])

    def _tensor(self, rows: Iterable[tuple[int, int]]) -> Tensor:
        data = b"".join(self._row(page, row) for page, row in rows)
        try:
            ids = self.index.ids(data).astype(np.int64)
        except ValueError as error:
            raise ConfigError(f"the data set cannot be trained on, since {error}: build it again") from error
        if self.index.masked:
            ids = np.where(self.index.marks(data), ids, -1 - ids)
        return torch.from_numpy(ids)

    def _row(self, page: int, row: int) -> bytes:
        size_bytes = self.index.row_bytes
        place = next((found for pages in self._places if (found := pages.find(page)) is not None), None)
        if place is not None:
            try:
                data = read_at(place, row * size_bytes, size_bytes)
            except OSError:
                data = b""
            if len(data) == size_bytes:
                return data
        raise ConfigError(f"page {page} of the data set is not on this machine")


def place_of(index: PageIndex, number: int, seed: int) -> tuple[int, int]:
    """Return the page that holds a sample, and the window there."""
    epoch, at = divmod(number, index.train.windows)
    key = f"{seed}:{epoch}"
    page = _page_at(index, at // index.page_windows, key)
    return page, permute(at % index.page_windows, index.rows(page), f"{key}:{page}")


def pages_of(index: PageIndex, ranges: Iterable[tuple[int, int]], seed: int, most: int = PAGES_MAX) -> list[int]:
    """Return the pages that hold the samples of half-open ranges, in the order in which they are read: the first
    `most`, however long a range is."""
    found = dict[int, None]()
    most = min(most, index.train.pages)
    for first, last in ranges:
        at = first
        while at < last and len(found) < most:
            epoch, within = divmod(at, index.train.windows)
            position = within // index.page_windows
            found[_page_at(index, position, f"{seed}:{epoch}")] = None
            at = epoch * index.train.windows + min((position + 1) * index.page_windows, index.train.windows)
    return [*found]


def _page_at(index: PageIndex, position: int, key: str) -> int:
    """Return the page at a position of the order of an epoch."""
    whole = index.train.windows // index.page_windows
    return permute(position, whole, key) if position < whole else whole


def facts_of(index: PageIndex, root: str) -> CorpusFacts:
    """Return the sizes of a data set."""
    tokens = index.seq_len + 1
    train, held_out = index.train, index.held_out
    return CorpusFacts(
        files=0,
        documents=train.documents + held_out.documents,
        train_bytes=train.text_bytes,
        held_out_bytes=held_out.text_bytes,
        train_tokens=train.windows * tokens,
        held_out_tokens=held_out.windows * tokens,
        truncated=False,
        account=(
            f"data set {root[:16]}: {train.documents + held_out.documents:,} documents,"
            f" {train.windows * tokens:,} tokens to train on in {several(train.pages, 'page')}"
            f" and {held_out.windows * tokens:,} held out"
        ),
    )
