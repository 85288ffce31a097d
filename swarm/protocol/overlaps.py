"""What the contributions of a pipeline's stage have counted: no sample is merged twice, whoever claims it.

A micro-batch whose answer was lost may have been counted by two replicas that could not ask each other. Both name it;
of contributions that name the same samples only some are merged. Which ones follows from the contributions alone, so
that every member of the group decides alike; whoever is not merged stays a member, and what only it has counted is free
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from swarm.protocol.ledger import Range, count, union
from swarm.protocol.plan import Contribution

EXACT_MAX: Final = 16  # contributions in one tangle; of more, the largest that fits is taken first


def merged_of(bodies: Sequence[Contribution]) -> tuple[bool, ...]:
    """Which of the contributions of a roster may be merged: those that lose fewest samples, and among these choices the
    one that keeps the earlier ones."""
    sizes = [count(body.counted) for body in bodies]
    rivals = _rivals(bodies)
    kept: set[int] = set()
    for tangle in _tangles(rivals):
        if len(tangle) > EXACT_MAX:
            kept |= _largest_first(tangle, rivals, sizes)
        else:
            kept |= _best(tangle, rivals, sizes)[1]
    return tuple(i in kept for i in range(len(bodies)))


def all_counted(bodies: Sequence[Contribution], batch: Range) -> bool:
    """Whether contributions that do not overlap are made of all the samples of `batch`."""
    return union(r for body in bodies for r in body.counted) == (batch,)


def _rivals(bodies: Sequence[Contribution]) -> dict[int, set[int]]:
    """For each contribution those that name a sample of it."""
    rivals: dict[int, set[int]] = {i: set() for i in range(len(bodies))}
    reaching: list[tuple[int, int]] = []  # (its end, whose range): those that the next one may overlap
    for first, last, i in sorted((first, last, i) for i, body in enumerate(bodies) for first, last in body.counted):
        reaching = [(end, other) for end, other in reaching if end > first]
        for _, other in reaching:
            rivals[i].add(other)
            rivals[other].add(i)
        reaching.append((last, i))
    return rivals


def _tangles(rivals: Mapping[int, set[int]]) -> list[list[int]]:
    """The contributions in groups that have nothing to do with each other."""
    tangles: list[list[int]] = []
    seen: set[int] = set()
    for start in rivals:
        tangle, next_ones = [], [start]
        while next_ones:
            i = next_ones.pop()
            if i not in seen:
                seen.add(i)
                tangle.append(i)
                next_ones += rivals[i]
        if tangle:
            tangles.append(sorted(tangle))
    return tangles


def _best(left: Sequence[int], rivals: Mapping[int, set[int]], sizes: Sequence[int]) -> tuple[int, set[int]]:
    """The heaviest set without rivals, and its samples."""
    if not left:
        return 0, set()
    first, others = left[0], left[1:]
    with_it = _best([i for i in others if i not in rivals[first]], rivals, sizes)
    samples, kept = with_it[0] + sizes[first], with_it[1] | {first}
    if not rivals[first] & set(others):
        return samples, kept
    without_it = _best(others, rivals, sizes)
    return (samples, kept) if samples >= without_it[0] else without_it


def _largest_first(tangle: Sequence[int], rivals: Mapping[int, set[int]], sizes: Sequence[int]) -> set[int]:
    kept: set[int] = set()
    for i in sorted(tangle, key=lambda i: (-sizes[i], i)):
        if not rivals[i] & kept:
            kept.add(i)
    return kept
