"""Runs of a message's slices that are committed to, owned and certified together.

A message has as many slices as its length asks for, of at most 2^21 values each: 3,340 with 7 billion. They are coded,
sent, merged and applied one by one. A contributor commits to, and an owner signs, one hash a bundle. A message has at
most 240 bundles, so that one roster holds the contributions of 64 peers at any size of the model.

A bundle of one slice has that slice's hash and squared norm. One of several has blake3 of its slices' hashes, one after
the other, and the sum of their squared norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from blake3 import blake3

BUNDLES_MAX: Final = 240  # of a message: 10 KB of hashes and norms
T = TypeVar("T")


@dataclass(frozen=True)
class Bundles:
    """The bundles of a message with `slices` slices: each has `size` of them, the last one perhaps fewer."""

    slices: int
    size: int = 1

    @classmethod
    def at_most(cls, most: int, slices: int) -> Bundles:
        """Return bundles that are as small as a message with `slices` slices and at most `most` bundles allows."""
        return cls(slices, max(1, -(-slices // most)))

    @property
    def count(self) -> int:
        return -(-self.slices // self.size)

    def of(self, index: int) -> int:
        """Return the bundle of a slice."""
        return index // self.size

    def indices(self, bundle: int) -> range:
        """Return the slices of a bundle."""
        return range(bundle * self.size, min((bundle + 1) * self.size, self.slices))

    def hashes(self, slices: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return each bundle's hash, from those of all slices."""
        return tuple(map(bundle_hash, self._cut(slices)))

    def sqnorms(self, slices: Sequence[float]) -> tuple[float, ...]:
        """Return each bundle's squared norm, from those of all slices."""
        return tuple(map(math.fsum, self._cut(slices)))

    def _cut(self, slices: Sequence[T]) -> list[Sequence[T]]:
        return [slices[first : first + self.size] for first in range(0, self.slices, self.size)]


def bundle_hash(hashes: Sequence[bytes]) -> bytes:
    """Return the hash of the bundle whose slices have these."""
    return hashes[0] if len(hashes) == 1 else blake3(b"".join(hashes)).digest()
