"""The hash of the first samples that a peer trains on: a reader of the data set can tell whether they are its own.

samples_hashed  samples "0-80,240-320"  hash of their ids, 4 bytes each, little-endian, in this order
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from blake3 import blake3
from torch import Tensor

from peer.catalogue.pages import SamplesHashed
from peer.data.corpus import Corpus

FIRST_SAMPLES: Final = 1000
RANGES_MAX: Final = 64


class FirstSamples:
    """A reader of a corpus that hashes the first `FIRST_SAMPLES` samples, and tells of them once: with all of them, or
    where they come in more pieces than an event holds."""

    def __init__(self, corpus: Corpus, tell: Callable[[SamplesHashed], None]) -> None:
        self._corpus, self._tell = corpus, tell
        self._hasher = blake3()
        self._ranges: list[list[int]] = []
        self._left = FIRST_SAMPLES

    def batch(self, numbers: list[int], seed: int) -> Tensor:
        """As `Corpus.batch`."""
        tokens = self._corpus.batch(numbers, seed)
        if self._left:
            self._take(numbers[: self._left], tokens[: self._left])
        return tokens

    def _take(self, numbers: list[int], tokens: Tensor) -> None:
        self._hasher.update(tokens.numpy().astype("<u4").tobytes())
        for number in numbers:
            if self._ranges and self._ranges[-1][1] == number:
                self._ranges[-1][1] += 1
            else:
                self._ranges.append([number, number + 1])
        self._left = 0 if len(self._ranges) >= RANGES_MAX else self._left - len(numbers)
        if not self._left:
            samples = ",".join(f"{first}-{last}" for first, last in self._ranges)
            self._tell(SamplesHashed(samples=samples, hash=self._hasher.hexdigest()))


def parse_ranges(text: str) -> list[int]:
    """Return the numbers of "0-80,240-320", half-open ranges. Raises ValueError."""
    numbers = list[int]()
    for part in text.split(","):
        first, last = map(int, part.split("-"))
        if not 0 <= first < last or last - first > 1 << 20:
            raise ValueError(f"{part} is no range of samples")
        numbers += range(first, last)
    return numbers


def hash_of(corpus: Corpus, numbers: list[int], seed: int) -> str:
    """Return the hash of samples, as the event has it."""
    hasher = blake3()
    for at in range(0, len(numbers), FIRST_SAMPLES):
        tokens = corpus.batch(numbers[at : at + FIRST_SAMPLES], seed)
        hasher.update(np.ascontiguousarray(tokens.numpy().astype("<u4")).tobytes())
    return hasher.hexdigest()
