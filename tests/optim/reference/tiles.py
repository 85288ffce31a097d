"""The tiles of a parameter in DeMo and SparseLoCo: each dimension is cut by its largest divisor up to `CHUNK`."""

from __future__ import annotations

from typing import Final

CHUNK: Final = 4


def tiles(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Return the tiles of a vector or a matrix, by plain loops."""
    cuts = []
    for n in shape:
        width = max(d for d in range(1, CHUNK + 1) if n % d == 0)
        cuts.append([slice(i, i + width) for i in range(0, n, width)])
    return [(a,) for a in cuts[0]] if len(shape) == 1 else [(a, b) for a in cuts[0] for b in cuts[1]]
