"""Cuts of a decoder of L blocks into S contiguous stages: the embedding in the first, the head in the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from peer.errors import ConfigError


@dataclass(frozen=True)
class PartCost:
    """The cost of a block, the embedding or the head: `compute` in any unit (FLOPs, seconds), `memory_bytes` at a
    peer."""

    compute: float
    memory_bytes: float = 0.0


NOTHING = PartCost(0.0)


def split_layers(
    blocks: Sequence[PartCost],
    stages: int,
    embedding: PartCost = NOTHING,
    head: PartCost = NOTHING,
    memory_max_bytes: float = math.inf,
) -> tuple[tuple[int, int], ...]:
    """Return the blocks of each stage as (first, end), at least one a stage.

    The slowest stage is as fast as possible with no stage over `memory_max_bytes`; of all such splits, the largest
    stage needs the least memory. Exact, O(stages * blocks^2). Raises ConfigError if there is no such split.
    """
    if not 1 <= stages <= len(blocks):
        raise ConfigError(f"{len(blocks)} blocks cannot make {stages} stages: choose 1 to {len(blocks)}")
    compute = _running([block.compute for block in blocks])
    memory = _running([block.memory_bytes for block in blocks])

    def compute_of(first: int, last: int) -> float:
        return compute[last] - compute[first] + _ends(first, last, embedding.compute, head.compute)

    def memory_of(first: int, last: int) -> float:
        return memory[last] - memory[first] + _ends(first, last, embedding.memory_bytes, head.memory_bytes)

    def _ends(first: int, last: int, before: float, after: float) -> float:
        return (before if first == 0 else 0.0) + (after if last == len(blocks) else 0.0)

    fits = _minimax(len(blocks), stages, compute_of, lambda a, b: memory_of(a, b) <= memory_max_bytes)
    if fits is None:
        lightest = _minimax(len(blocks), stages, memory_of, lambda a, b: True)
        assert lightest is not None  # nothing is forbidden
        raise ConfigError(
            f"no split into {stages} stages fits into {memory_max_bytes / 2**30:.2f} GiB a stage: allow "
            f"{lightest[0] / 2**30:.2f} GiB or choose more stages"
        )
    slowest = fits[0]
    lightest = _minimax(len(blocks), stages, memory_of, lambda a, b: compute_of(a, b) <= slowest)
    assert lightest is not None  # `fits` is one
    return lightest[1]


def _running(values: Sequence[float]) -> list[float]:
    return [math.fsum(values[:count]) for count in range(len(values) + 1)]


def _minimax(
    blocks: int, stages: int, cost: Callable[[int, int], float], allowed: Callable[[int, int], bool]
) -> tuple[float, tuple[tuple[int, int], ...]] | None:
    """Return the split with the least largest `cost` of all whose every stage is `allowed`: (that cost, the stages)."""
    # best[n]: the first n blocks in the stages so far -> (largest cost, where the last stage begins)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, -1)] * blocks]
    for stage in range(1, stages + 1):
        row = [(math.inf, -1)] * (blocks + 1)
        for last in range(stage, blocks - (stages - stage) + 1):
            for first in range(stage - 1, last):
                before = best[-1][first][0]
                if before < math.inf and allowed(first, last):
                    row[last] = min(row[last], (max(before, cost(first, last)), first))
        best.append(row)
    if best[stages][blocks][0] == math.inf:
        return None
    bounds = [blocks]
    for stage in range(stages, 0, -1):
        bounds.append(best[stage][bounds[-1]][1])
    bounds.reverse()
    return best[stages][blocks][0], tuple(pairwise(bounds))
