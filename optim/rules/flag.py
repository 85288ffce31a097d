"""Weights by a common direction, after the Flag Aggregator (Almasi et al., arXiv 2302.05865).

Wanted is the line y nearest to the contributions' directions u_i = g_i / |g_i|, by the sum of distances
sqrt(1 - (y . u_i)^2) (the flag median). The merge is the mean's projection on it, y y^T sum w_i g_i.

Iteratively reweighted least squares find y: the leading left singular vector of the columns d_i u_i, with
d_i = (1 - (y . u_i)^2 + 1e-7)^(-1/4) from the y before, all 1 at first. Everything is a matter of the n x n matrix
K_ij = u_i . u_j. With D = diag(d) and the leading eigenvector v of D K D, eigenvalue l:

    (y . u_i)^2 = l v_i^2 / d_i^2            y y^T sum b_i u_i = sum a_i u_i,   a = D v v^T D^-1 b

So the projection is a weighted sum of the contributions, with weights a_i / |g_i|, which may be negative.

The paper's subspace has m dimensions. Here it has one, the default of the authors' code: with more the subspace
contains the direction of a single liar. From their code this differs otherwise, too: the gate's weights are in the sum,
y starts at the plain singular vector instead of at random, and the optional term of pairwise differences is left out.
Each owner judges its own slice alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from optim.codecs import Buffer, Codec
from optim.codecs.rows import absmax
from optim.merge import encoded_slices, merge_part
from optim.rules.interface import MeanRule

ITERATIONS: Final = 4
NEAR: Final = 1e-7
"""Keeps the weight of a direction on the line finite: at most 56."""
CONTRIBUTORS_MIN: Final = 3
"""Of two it is unknown which one is wrong, and if they disagree the nearest line is that of their difference."""
LEVELS: Final = 1 << 15
"""Values are rounded to integers of 15 bits for K. Products are at most 2^30, and float64 holds a sum of 2^22 of them
without rounding: any order of a BLAS has the same bits."""
PIECE: Final = 1 << 15
TINY: Final = 2.0**-126
"""fp32's smallest normal number: its reciprocal is finite."""
SWEEPS_MAX: Final = 40  # converges quadratically: about 6 to 10 for up to 64 coordinates
SMALL: Final = 1e-15  # off the diagonal, relative to the largest eigenvalue
Matrix = np.ndarray[Any, np.dtype[np.float64]]


class FlagRule(MeanRule):
    """The projection of the weighted mean on the common direction. Its norm is at most the mean's."""

    def merge(
        self, codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int, out_codec: Codec
    ) -> torch.Tensor:
        shares = flag_weights(gram(codec, encoded, weights, numel), weights)
        return merge_part(codec, encoded, shares, numel, out_codec)


def gram(codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int) -> Matrix:
    """Return the products of all pairs of contributions, (n, n) float64. They are those of the values rounded to
    1 / 32768 of the largest value of a contribution in a chunk."""
    views = encoded_slices(codec, encoded, weights, numel)
    step = max(PIECE // codec.granule, 1) * codec.granule
    n, size = len(views), min(step, numel)
    values, whole = torch.empty(size, dtype=torch.float32), torch.empty(n, size, dtype=torch.float64)
    total, widths = np.zeros((n, n)), np.zeros(n)
    for first in range(0, numel, step):
        last = min(first + step, numel)
        part, rounded = values[: last - first], whole[:, : last - first]
        for i, view in enumerate(views):
            view.decode(first, last, part)
            widths[i] = max(float(absmax(part)) / LEVELS, TINY)
            rounded[i].copy_(part.mul_(1.0 / widths[i]).round_())
        plain = rounded.numpy()
        total += (plain @ plain.T) * widths[:, None] * widths[None, :]
    return total


def flag_weights(products: Matrix, weights: Sequence[float]) -> list[float]:
    """Return the weight of each contribution in the merge. `products`: see `gram`; `weights`: in the mean, and of one
    or two contributors the result."""
    n = len(weights)
    if n < CONTRIBUTORS_MIN:
        return list(weights)
    norms = np.sqrt(np.maximum(products.diagonal(), 0.0))
    inverse = np.where(norms > 0, 1.0 / np.where(norms > 0, norms, 1.0), 0.0)
    unit = products * inverse[:, None] * inverse[None, :]
    d = np.ones(n)
    value, vector = _leading(unit, d)
    for _ in range(ITERATIONS):
        inside = value * vector * vector / d / d
        d = 1.0 / np.sqrt(np.sqrt(np.maximum(1.0 - inside, 0.0) + NEAR))
        value, vector = _leading(unit, d)
    share = math.fsum(vector * (np.array(weights) * norms) / d)
    return [float(x) for x in d * vector * share * inverse]


def _leading(unit: Matrix, d: Matrix) -> tuple[float, Matrix]:
    """Return the largest eigenvalue of D K D and its eigenvector (n,)."""
    values, vectors = eigen(unit * d[:, None] * d[None, :])
    return max(float(values[0]), 0.0), vectors[:, 0]


def eigen(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return the eigenvalues, largest first, (n,), and their eigenvectors as columns, (n, n), of a symmetric matrix
    (n, n), float64 and finite.

    The bits are the same on every CPU, unlike LAPACK's: Jacobi's method turns disjoint pairs of coordinates at once.
    Every operation is elementwise, with one rounding."""
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
