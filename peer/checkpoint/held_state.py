"""A snapshot of a state that a thread reads while later rounds overwrite its tensors.

    owner                                      reader
    keep(place): copies what is not copied     pieces(vector, place): each piece from its copy, else from where it lies
    yet, and then changes it

So nothing is copied while nothing changes, and neither waits for more than the copy of one piece.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

from torch import Tensor

from peer.checkpoint.hash_tree import StateTree, StreamHasher

PIECE: Final = 1 << 20
"""Values that are copied at a time."""


class HeldState:
    """Flat fp32 vectors of one shape (P,), on the CPU, with the values that they have when this is made."""

    def __init__(self, tensors: Mapping[str, Tensor], tree: StateTree | None = None) -> None:
        """`tensors`: "theta" and others. `tree`: their hash tree, if it is known."""
        self.vectors: Final = tuple(tensors)
        self.numel: Final = next(iter(tensors.values())).numel()
        self._tensors, self._known = dict(tensors), tree
        self._copies: dict[tuple[str, int], Tensor] = {}
        self._lock = threading.Lock()  # held for the copy of one piece at most

    @property
    def size_bytes(self) -> int:
        return 4 * self.numel * len(self.vectors)

    @property
    def copied_bytes(self) -> int:
        """The bytes that were copied since they were to change."""
        with self._lock:
            return sum(4 * copy.numel() for copy in self._copies.values())

    @cached_property
    def tree(self) -> StateTree:
        """The hash tree. Blocks for a pass over the state if it was not given."""
        if self._known is not None:
            return self._known
        hasher = StreamHasher(self.size_bytes)
        for name in self.vectors:
            for piece in self.pieces(name, slice(0, self.numel)):
                hasher.passed(piece)
        return hasher.tree()

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the vectors that it was made of."""
        return any(mine is tensors[0] for mine in self._tensors.values())

    def keep(self, place: slice) -> None:
        """Copy what lies at `place` of each vector, unless it was copied: it may change when this returns. Blocks."""
        for number in range(place.start // PIECE, -(-place.stop // PIECE)):
            for name in self.vectors:
                with self._lock:
                    if (name, number) not in self._copies:
                        self._copies[name, number] = self._tensors[name][number * PIECE : (number + 1) * PIECE].clone()

    def pieces(self, vector: str, place: slice) -> Iterator[memoryview]:
        """Yield the bytes of one vector at `place`, a piece at a time. May be called again, with the same result."""
        start = place.start
        while start < place.stop:
            number = start // PIECE
            stop = min(place.stop, (number + 1) * PIECE)
            with self._lock:
                copy = self._copies.get((vector, number))
                if copy is None:
                    piece = self._tensors[vector][start:stop].clone()
            if copy is not None:
                piece = copy[start - number * PIECE : stop - number * PIECE]
            yield memoryview(piece.numpy().view("u1").data)
            start = stop
