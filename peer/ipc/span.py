"""A range of a model's blocks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks from `first` up to, but without, `end`, of a model of `of` blocks."""

    first: int
    end: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end <= self.of:
            raise ValueError(
                f"blocks [{self.first}, {self.end}) of {self.of}: choose at least one block inside the model"
            )

    def __str__(self) -> str:
        return f"[{self.first}, {self.end}) of {self.of}"

    @classmethod
    def whole(cls, of: int) -> Span:
        """The span of all blocks."""
        return cls(0, of, of)

    @property
    def is_first(self) -> bool:
        """Whether the span begins at the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the span ends at the head."""
        return self.end == self.of

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self.end - self.first

    @property
    def blocks(self) -> range:
        """The numbers of the blocks."""
        return range(self.first, self.end)


def spans_of(cuts: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """Turn (first, end) of each stage, in order, into spans. Raises ValueError unless they follow each other from block
    0 without gaps."""
    pairs = list(cuts)
    starts = [0, *(end for _, end in pairs)]
    if not pairs or any(first != start for (first, _), start in zip(pairs, starts, strict=False)):
        raise ValueError(f"the stages are {pairs}: let them follow each other from block 0 without gaps")
    return tuple(Span(first, end, starts[-1]) for first, end in pairs)
