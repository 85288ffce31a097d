"""The codecs in float64: what a decoded vector holds, from each codec's definition.

Each function takes a block's values, (n,) float64, and returns them as a receiver reads them. Where a value lies within
fp32's rounding of a tie, code in fp32 may decide otherwise. Formulas with such ties also return the values with those
few moved off, to the middle of what their code stands for; a test codes these instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

import numpy as np

ROW: Final = 4096
Coded = tuple[np.ndarray, np.ndarray]
"""The decoded values, and the values off ties, each (n,)."""
FAR: Final = 1e-5  # of all codes' range, or of the distance to the mean; fp32's errors there are some 1e-6


def scale_up(least: float, bits: int) -> float:
    """Return the smallest number of so many significant bits that is at least `least`, and at least 2^-126."""
    mantissa, exponent = math.frexp(least)
    return max(math.ldexp(math.ceil(mantissa * 2**bits), exponent - bits), 2.0**-126)


def cast(x: np.ndarray, bits: int, smallest: int) -> np.ndarray:
    """Return the nearest numbers of so many significant bits, ties to even. `smallest`: the exponent of 2 of the
    format's smallest number."""
    exponent = np.frexp(x)[1] - bits
    unit = np.exp2(np.maximum(exponent, smallest).astype(np.float64))
    return np.rint(x / unit) * unit


def nearest_integers(x: np.ndarray, qmax: int, bits: int) -> Coded:
    """int8 and int4: q * scale, scale = absmax / qmax, rounded up to `bits` significant bits."""
    scale = scale_up(np.abs(x).max() / qmax, bits)
    q = np.rint(x / scale)
    tie = np.abs(np.abs(x / scale - q) - 0.5) < FAR * qmax
    return q * scale, np.where(tie, q * scale, x)


def nearest_of(x: np.ndarray, values: np.ndarray) -> Coded:
    """NF4 and fp4: the nearest of ascending `values` times absmax, rounded up to bf16."""
    scale = scale_up(np.abs(x).max(), 8)
    middles = (values[1:] + values[:-1]) / 2
    decoded = values[np.searchsorted(middles, x / scale)] * scale
    return decoded, np.where(np.abs((x / scale)[:, None] - middles).min(1) < FAR, decoded, x)


def six_sigma(x: np.ndarray) -> Coded:
    """INTELLECT-1 (2412.01152): 256 equal bins over mean +- 6 sigma, decoded to the mean of their values."""
    mean, sigma = x.mean(), x.std(ddof=1) if len(x) > 1 else 0.0
    if sigma == 0:
        return x, x
    width = 12 * sigma / 256
    place = (x - mean) / width + 128
    q = np.clip(np.floor(place), 0, 255).astype(int)
    means = np.bincount(q, x, minlength=256) / np.maximum(np.bincount(q, minlength=256), 1)
    edge = np.clip(np.rint(place), 1, 255)  # the nearest one between two bins
    tie = np.abs(place - edge) < FAR * (1 + np.abs(edge - 128))
    return means[q], np.where(tie, mean + (q + 0.5 - 128) * width, x)


def ternary(x: np.ndarray, draws: np.ndarray) -> Coded:
    """TernGrad (1705.07878): s * sign(x) with probability |x| / s, else 0; s is absmax, rounded up to bf16. A value is
    sent if the draw, uniform in [0, 1), is at least 1 - |x| / s."""
    scale = scale_up(np.abs(x).max(), 8)
    chance = np.abs(x) / scale
    tie = (np.abs(chance + draws - 1) < FAR) & (chance < 1)
    return scale * np.sign(x) * (draws >= 1 - chance), np.where(tie, 0.0, x)


def best_magnitudes() -> tuple[float, float]:
    """Return the magnitudes of the best symmetric four-level quantizer of a standard normal: each the mean of its
    cell, the cell's edge midway between them (Lloyd's two conditions)."""
    small, large = 0.5, 1.5
    for _ in range(1000):
        edge = (small + large) / 2
        below = 0.5 * math.erf(edge / math.sqrt(2))
        density = math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi)
        small, large = (1 / math.sqrt(2 * math.pi) - density) / below, density / (0.5 - below)
    return small, large


SMALL, LARGE = best_magnitudes()


def two_bit(x: np.ndarray) -> Coded:
    """One of two magnitudes with the value's sign, the larger one beyond a threshold that follows the mean magnitude,
    times the scale of least squared error, in bf16."""
    sizes = np.abs(x)
    threshold = (SMALL + LARGE) / 2 * math.sqrt(math.pi / 2) * sizes.mean()
    levels = np.where(sizes > threshold, LARGE, SMALL) * np.where(x >= 0, 1, -1)
    scale = np.atleast_1d((x @ levels) / (levels @ levels))
    decoded = cast(scale, 8, -133) * levels
    if (cast(scale * (1 - FAR), 8, -133) != cast(scale * (1 + FAR), 8, -133)).any():
        return decoded, x * (1 + 2**-10)  # the scale lies midway between two
    return decoded, np.where(np.abs(sizes - threshold) < FAR * threshold, x * (1 + 2**-10), x)


def scaled_sign(x: np.ndarray) -> np.ndarray:
    """1901.09847: the mean magnitude (bf16) with the value's sign; 0 counts as positive."""
    return np.where(x >= 0, 1, -1) * cast(np.abs(x).mean()[None], 8, -133)


def top_k(x: np.ndarray) -> np.ndarray:
    """1809.07599: the 1/64 of the values with the largest magnitudes, an even number and at least 2, in bf16; a row of
    odd length has a 0 more."""
    kept = 2 * max(1, math.ceil(32 * (len(x) + len(x) % 2) / ROW))
    mask = np.zeros(len(x), dtype=bool)
    mask[np.argsort(-np.abs(x), kind="stable")[:kept]] = True
    return np.where(mask, cast(x, 8, -133), 0.0)


def _nf4() -> np.ndarray:
    """QLoRA (2305.14314, appendix E): quantiles of the normal distribution, 8 above 0, 7 below, scaled to [-1, 1]."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    return np.sort([*above, 0.0, *below]) / max(above)


NF4_VALUES: Final = _nf4()
E3M0_VALUES: Final = np.sort([0.0, *(sign * 2.0**-e for e in range(7) for sign in (-1, 1))])
"""Streaming DiLoCo (2501.18512): a sign and 3 bits of exponent, of which one code is 0."""

BLOCKS: Final[Mapping[str, tuple[int, Callable[[np.ndarray], Coded | np.ndarray] | None]]] = MappingProxyType(
    {
        "fp32": (ROW, np.copy),
        "fp16": (ROW, partial(cast, bits=11, smallest=-24)),
        "bf16": (ROW, partial(cast, bits=8, smallest=-133)),
        "int8": (ROW, partial(nearest_integers, qmax=127, bits=17)),
        "int8_6sigma": (1 << 16, six_sigma),
        "int4": (128, partial(nearest_integers, qmax=7, bits=8)),
        "nf4": (64, partial(nearest_of, values=NF4_VALUES)),
        "fp4_e3m0": (128, partial(nearest_of, values=E3M0_VALUES)),
        "two_bit": (128, two_bit),
        "ternary": (ROW, None),
        "sign": (ROW, scaled_sign),
        "topk": (ROW, top_k),
    }
)
"""Each codec's block, whose values share what is sent beside them, and its formula; `ternary` needs
draws, too."""


def coded(name: str, x: np.ndarray, draws: np.ndarray) -> Coded:
    """Code a whole vector, (n,), n > 0. `draws`: uniform numbers in [0, 1), (n,), for `ternary`."""
    block, formula = BLOCKS[name]
    decoded, off_ties = np.empty_like(x), x.copy()
    for first in range(0, len(x), block):
        part = slice(first, first + block)
        found = ternary(x[part], draws[part]) if formula is None else formula(x[part])
        if isinstance(found, tuple):
            decoded[part], off_ties[part] = found
        else:
            decoded[part] = found
    return decoded, off_ties
