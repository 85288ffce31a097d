"""Decisions that fp32's rounding could turn: signs, and which values are the largest.

A formula and the code agree to 1e-6 only while they decide alike. So each decision here checks that the test problem
leaves it no doubt; a problem that does must be changed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

FAR: Final = 1e-6  # relative to the largest value; fp32's error here is some 1e-7


def sign(x: np.ndarray) -> np.ndarray:
    """Return -1 or 1 for each value."""
    assert np.abs(x).min() > FAR * np.abs(x).max(), "the test problem has a value too close to 0: change its seed"
    return np.sign(x)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return a mask of x's shape, True at the k largest magnitudes."""
    order = np.argsort(-np.abs(x.ravel()), kind="stable")
    sizes = np.abs(x.ravel())[order]
    assert k == x.size or sizes[k - 1] - sizes[k] > FAR * sizes[0], "the test problem has a tie: change its seed"
    mask = np.zeros(x.size, dtype=bool)
    mask[order[:k]] = True
    return mask.reshape(x.shape)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the nearest integers."""
    assert np.abs(x - np.floor(x) - 0.5).min() > FAR * np.abs(x).max(), "the test problem has a tie: change its seed"
    return np.rint(x)
