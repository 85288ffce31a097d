"""Every codec against its formula in float64, value by value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.codecs import CODECS, ROW
from optim.codecs.tables import NF4_VALUES
from tests.optim.reference import codecs as reference

LENGTHS = (1, 2, 3, 129, 1000, ROW - 1, ROW + 1, 2 * ROW + 777)
SCALES = (1e-30, 1e-5, 100.0)
CLOSE = 1e-6
SHAPES = {
    "normal": lambda g, n: g.normal(size=n),
    "heavy tails": lambda g, n: g.normal(size=n) ** 3,
    "uniform": lambda g, n: g.uniform(-1, 1, n),
    "one sign": lambda g, n: g.exponential(size=n) + 0.1,
    "mostly zeros": lambda g, n: g.normal(size=n) * (g.random(n) < 0.1),
    "rows of different size": lambda g, n: g.normal(size=n) * 10.0 ** (np.arange(n) // 64 % 7 - 4),
}


def off_ties(name: str, x: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return fp32 values without ties, in float64, and what they decode to."""
    for _ in range(20):
        x = x.astype(np.float32).astype(np.float64)
        decoded, moved = reference.coded(name, x, draws)
        if np.array_equal(moved, x):
            return x, decoded
        x = moved
    raise AssertionError("the vector keeps ties: change its seed")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["a third", "every"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CODECS)
def test_decoded_values_are_those_of_the_formula(name: str, shape: str, every: bool) -> None:
    """Unless `every`, each length has one of the scales, another one in the next shape."""
    codec, six_sigma = CODECS[name], name == "int8_6sigma"
    scales = [*enumerate(SCALES[1:] if six_sigma else SCALES)]  # it squares values in fp32
    for number, length in enumerate((*LENGTHS, (1 << 16) + 130) if six_sigma else LENGTHS, [*SHAPES].index(shape)):
        for seed, scale in scales if every else [scales[number % len(scales)]]:
            generator = np.random.default_rng(1000 * seed + length)
            torch.manual_seed(length)
            draws = torch.rand(length).double().numpy()
            x, wanted = off_ties(name, SHAPES[shape](generator, length) * scale, draws)
            torch.manual_seed(length)  # `ternary` draws the same numbers
            data = codec.encode(torch.from_numpy(x).float())
            got = codec.decode(data, length).double().numpy()
            slack = CLOSE * np.abs(x).max() if six_sigma else 0.0  # a bin's mean is a sum in fp32
            assert np.all(np.abs(got - wanted) <= CLOSE * np.abs(wanted) + slack), (length, scale)


def test_nf4_is_made_of_the_normal_distributions_quantiles() -> None:
    assert np.abs(reference.NF4_VALUES - np.array(NF4_VALUES)).max() < CLOSE
