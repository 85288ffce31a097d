"""Training text as one endless stream of numbered samples.

Sample `i` belongs to epoch `i // windows`, in which each window of seq_len + 1 tokens has one number. So peers that
take disjoint ranges of numbers train on disjoint text, and no window repeats inside an epoch. The text is a folder of
this machine (`peer.data.text_corpus`) or a data set of all (`peer.data.pages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from peer.corpus_facts import CorpusFacts


class Corpus(Protocol):
    """Windows to train on, and held-out ones."""

    @property
    def digest(self) -> bytes:
        """32 bytes, equal if both texts are."""
        ...

    @property
    def facts(self) -> CorpusFacts: ...

    @property
    def has_marks(self) -> bool:
        """Whether some tokens do not count in the loss: a batch holds such a token as -1 - id."""
        ...

    @property
    def windows(self) -> int:
        """The number of samples in one epoch."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """The ratio in the held-out text, which converts a loss in nats a token to nats a byte."""
        ...

    def batch(self, numbers: list[int], seed: int) -> Tensor:
        """Return the samples with these numbers, (B, seq_len + 1) int64. `seed`: of the order of each epoch."""
        ...

    def held_out_batches(self, batch_size: int, max_batches: int) -> Iterator[Tensor]:
        """Yield at most `max_batches` batches of held-out windows, spread evenly; the same on every call."""
        ...


def sample_numbers(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the numbers of half-open ranges, in order."""
    for start, stop in ranges:
        yield from range(start, stop)
