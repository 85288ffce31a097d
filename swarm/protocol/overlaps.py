"""Contributions of a pipeline's stage that have counted the same samples: no sample is merged twice.

If an answer is lost, two replicas that cannot ask each other may count the same micro-batch. Both name its samples, and
only one of the two contributions is merged. The choice follows from the contributions alone, so that all members decide
alike. A peer whose contribution is not merged stays a member; the samples that only it has counted are free again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from swarm.protocol.ledger import Range, count, union
from swarm.protocol.plan import Contribution

EXACT_MAX: Final = 16  # contributions in one cluster for an exact search; larger clusters are searched greedily


def select_disjoint(bodies: Sequence[Contribution]) -> tuple[bool, ...]:
    """Choose contributions without common samples; return for each contribution whether it is merged.

    The choice loses the fewest samples; among equals it keeps the earlier contributions. In clusters of more than
    `EXACT_MAX` contributions it takes the largest that fit."""
    sizes = [count(body.counted) for body in bodies]
    rivals = _rivals(bodies)
    kept: set[int] = set()
    for cluster in _clusters(rivals):
        if len(cluster) > EXACT_MAX:
            kept |= _largest_first(cluster, rivals, sizes)
        else:
            kept |= _best(cluster, rivals, sizes)[1]
    return tuple(i in kept for i in range(len(bodies)))


def covers_batch(bodies: Sequence[Contribution], batch: Range) -> bool:
    """Return whether contributions without common samples contain exactly the samples of `batch`."""
    return union(r for body in bodies for r in body.counted) == (batch,)


def _rivals(bodies: Sequence[Contribution]) -> dict[int, set[int]]:
    """Map each contribution to those that share a sample with it."""
    rivals: dict[int, set[int]] = {i: set() for i in range(len(bodies))}
    reaching: list[tuple[int, int]] = []  # (end, contribution) of the ranges that the next range may overlap
    for first, last, i in sorted((first, last, i) for i, body in enumerate(bodies) for first, last in body.counted):
        reaching = [(end, other) for end, other in reaching if end > first]
        for _, other in reaching:
            rivals[i].add(other)
            rivals[other].add(i)
        reaching.append((last, i))
    return rivals


def _clusters(rivals: Mapping[int, set[int]]) -> list[list[int]]:
    """Return the connected components of the graph of rivals."""
    clusters: list[list[int]] = []
    seen: set[int] = set()
    for start in rivals:
        cluster, open_ones = [], [start]
        while open_ones:
            i = open_ones.pop()
            if i not in seen:
                seen.add(i)
                cluster.append(i)
                open_ones += rivals[i]
        if cluster:
            clusters.append(sorted(cluster))
    return clusters


def _best(left: Sequence[int], rivals: Mapping[int, set[int]], sizes: Sequence[int]) -> tuple[int, set[int]]:
    """Return the number of samples of the largest set without rivals, and that set."""
    if not left:
        return 0, set()
    first, others = left[0], left[1:]
    with_it = _best([i for i in others if i not in rivals[first]], rivals, sizes)
    samples, kept = with_it[0] + sizes[first], with_it[1] | {first}
    if not rivals[first] & set(others):
        return samples, kept
    without_it = _best(others, rivals, sizes)
    return (samples, kept) if samples >= without_it[0] else without_it


def _largest_first(cluster: Sequence[int], rivals: Mapping[int, set[int]], sizes: Sequence[int]) -> set[int]:
    """Return a set without rivals, built greedily from the largest contribution on."""
    kept: set[int] = set()
    for i in sorted(cluster, key=lambda i: (-sizes[i], i)):
        if not rivals[i] & kept:
            kept.add(i)
    return kept
