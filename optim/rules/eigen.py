"""Eigenvectors of small symmetric matrices with the same bits on every CPU: LAPACK's differ.

Jacobi's method turns disjoint pairs of coordinates at once. Every operation is elementwise, with one rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

SWEEPS_MAX: Final = 40  # converges quadratically: about 6 to 10 for up to 64 coordinates
SMALL: Final = 1e-15  # off the diagonal, relative to the largest eigenvalue
Matrix = np.ndarray[Any, np.dtype[np.float64]]


def eigen(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return the eigenvalues, largest first, (n,), and their eigenvectors as columns, (n, n), of a symmetric matrix
    (n, n), float64 and finite."""
    a = matrix.copy()
    n = len(a)
    vectors = np.eye(n)
    outside = ~np.eye(n, dtype=bool)
    for _ in range(SWEEPS_MAX):
        if n == 1 or np.abs(a[outside]).max() <= SMALL * np.abs(a.diagonal()).max():
            break
        for p, q in _rounds(n):
            _rotate(a, vectors, p, q)
    values = a.diagonal()
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]


def _rotate(a: Matrix, vectors: Matrix, p: Matrix, q: Matrix) -> None:
    """Turn each pair of coordinates (p[i], q[i]) so that a[p, q] becomes 0."""
    app, aqq, apq = a[p, p], a[q, q], a[p, q]
    with np.errstate(all="ignore"):  # of a tiny a[p, q]: the angle is then 0
        theta = (aqq - app) / (apq * 2.0)
        tangent = np.copysign(1.0, theta) / (np.abs(theta) + np.sqrt(theta * theta + 1.0))
    tangent = np.where(apq == 0, 0.0, tangent)
    cosine = 1.0 / np.sqrt(tangent * tangent + 1.0)
    sine = tangent * cosine
    for target in (a, a.T, vectors.T):  # rows, columns, and the columns of the vectors
        at_p, at_q = target[p], target[q]
        target[p] = cosine[:, None] * at_p - sine[:, None] * at_q
        target[q] = sine[:, None] * at_p + cosine[:, None] * at_q
    a[p, q] = a[q, p] = 0.0


@lru_cache(maxsize=16)
def _rounds(n: int) -> tuple[tuple[Any, Any], ...]:
    """Return n - 1 rounds (n if odd) of disjoint pairs, all pairs together: the circle method of tournaments."""
    players = [*range(n), *([-1] if n % 2 else [])]
    half, found = len(players) // 2, []
    for _ in range(len(players) - 1):
        pairs = [
            (min(x, y), max(x, y))
            for x, y in zip(players[:half], reversed(players[half:]), strict=True)
            if x >= 0 and y >= 0
        ]
        found.append((np.array([x for x, _ in pairs]), np.array([y for _, y in pairs])))
        players.insert(1, players.pop())
    return tuple(found)
