"""Keys and values of sessions, with room that is counted in pages before it is taken.

Each session has one contiguous stretch a layer, because gathering small pages costs two to four times the attention on
a CPU. It grows by doubling. Pages are the unit of the account: the pages of all sessions, and those kept of ended ones
for their owner's next session with the same beginning, never exceed the budget. Kept pages are evicted when a session
needs room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.ipc.block_messages import PAGE_TOKENS


class CacheFull(Exception):
    """There is no room for more tokens now."""


def pages_of(tokens: int) -> int:
    """Return the pages that this many tokens take."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class CacheShape:
    """Of the cache of one span."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    tokens_max: int
    """The longest context."""

    def room(self, pages: int) -> Tensor:
        """Return an empty stretch (L, 2, K, tokens, D)."""
        size = (self.layers, 2, self.kv_heads, pages * PAGE_TOKENS, self.head_size)
        return torch.empty(size, dtype=self.dtype, device=self.device)


class SessionCache:
    """The keys and values of one session: `length` tokens of `stretch` (L, 2, K, tokens, D)."""

    def __init__(self, stretch: Tensor, length: int, ids: Sequence[int] = ()) -> None:
        self.stretch = stretch
        self.length = length
        self.ids = list(ids)
        """The tokens of these positions, and of those behind that are still to be computed."""

    @property
    def pages(self) -> int:
        return self.stretch.shape[3] // PAGE_TOKENS


@dataclass
class _Kept:
    """The rest of an ended session: whole pages, the names that their owner gave them, and the owner."""

    cache: SessionCache
    names: tuple[bytes, ...]
    owner: Hashable


class CachePool:
    """All caches of one worker, within `pages`."""

    def __init__(self, shape: CacheShape, pages: int) -> None:
        self.shape, self.pages = shape, pages
        self._held = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by the order of keeping, the oldest first
        self._count = 0

    @property
    def free_pages(self) -> int:
        """Pages that a session can have now, those of ended sessions included."""
        return self.pages - self._held + sum(kept.cache.pages for kept in self._kept.values())

    def open(self, names: Sequence[bytes] = (), owner: Hashable = None) -> SessionCache:
        """Return the cache of a new session. `names`: of the pages with which it begins, in order, each named after all
        tokens up to its end; the cache has as many of these as are kept here of the same `owner`, since nothing proves
        that pages are what they are called. Raises CacheFull."""
        best, shared = None, 0
        for kept in self._kept.values():
            same = _common(kept.names, names) if kept.owner == owner else 0
            if same > shared:
                best, shared = kept, same
        self._take(max(1, shared), best)
        length = shared * PAGE_TOKENS
        ids = best.cache.ids[:length] if best is not None else ()
        cache = SessionCache(self.shape.room(max(1, shared)), length, ids)
        if best is not None:
            cache.stretch.copy_(best.cache.stretch[:, :, :, :length])
        return cache

    def grow(self, cache: SessionCache, tokens: int) -> None:
        """Make room for this many tokens in all. Raises CacheFull; the cache is then as before."""
        needed = pages_of(tokens)
        if needed <= cache.pages:
            return
        pages = min(max(needed, 2 * cache.pages), pages_of(self.shape.tokens_max))
        pages = max(needed, min(pages, cache.pages + self.free_pages))
        self._take(pages - cache.pages)
        stretch = self.shape.room(pages)
        stretch[:, :, :, : cache.length] = cache.stretch[:, :, :, : cache.length]
        cache.stretch = stretch

    def close(self, cache: SessionCache, names: Sequence[bytes] = (), owner: Hashable = None) -> None:
        """End a session; its first pages may be kept under these names, for those of `owner` that begin alike."""
        whole = min(len(names), cache.length // PAGE_TOKENS)
        if not whole:
            self._held -= cache.pages
            return
        self._count += 1
        self._kept[self._count] = _Kept(cache, tuple(names[:whole]), owner)

    def _take(self, pages: int, spare: _Kept | None = None) -> None:
        """Count pages as held; drop what is kept but `spare`, the oldest first, until they fit. Raises CacheFull."""
        spared = spare.cache.pages if spare is not None else 0
        if pages > self.free_pages - spared:
            raise CacheFull(f"{pages} pages are needed, {max(0, self.free_pages - spared)} are free")
        for number, kept in list(self._kept.items()):
            if self._held + pages <= self.pages:
                break
            if kept is not spare:
                del self._kept[number]
                self._held -= kept.cache.pages
        self._held += pages


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return how many names two sequences have in common at their beginning."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
