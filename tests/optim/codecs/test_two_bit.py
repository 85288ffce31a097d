"""Two bits a value against the quantizer's definition in float64."""

from __future__ import annotations

from math import erf, exp, pi, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, get_codec
from optim.codecs.two_bit import LARGE, SMALL
from peer.errors import ProtocolViolation

CODEC = get_codec("two_bit")
BLOCK = 128


def best_magnitudes() -> tuple[float, float]:
    """Return the magnitudes of the best symmetric four-level quantizer of a standard normal: each the mean of its
    cell, the cell's edge midway between them (Lloyd's two conditions)."""
    small, large = 0.5, 1.5
    for _ in range(1000):
        edge = (small + large) / 2
        below = 0.5 * erf(edge / sqrt(2))
        density = exp(-edge * edge / 2) / sqrt(2 * pi)
        small, large = (1 / sqrt(2 * pi) - density) / below, density / (0.5 - below)
    return small, large


def reference(x: np.ndarray) -> np.ndarray:
    """Quantize x (n,) block by block, in float64; scales as bf16 rounds them."""
    small, large = best_magnitudes()
    out = np.empty(len(x))
    for first in range(0, len(x), BLOCK):
        block = x[first : first + BLOCK].astype(np.float64)
        sizes = np.abs(block)
        far = sizes > (small + large) / 2 * sqrt(pi / 2) * sizes.mean()
        levels = np.where(far, large, small) * np.where(block >= 0, 1, -1)
        scale = (block @ levels) / (levels @ levels)
        out[first : first + BLOCK] = float(torch.tensor(scale).to(torch.bfloat16)) * levels
    return out


def test_the_levels_are_the_best_ones_of_a_normal() -> None:
    assert best_magnitudes() == pytest.approx((SMALL, LARGE), rel=1e-9)


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("numel", [1, 127, 128, 300, ROW, 3 * ROW + 77])
def test_values_are_those_of_the_definition(numel: int, power: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).pow(power) * 1e-3
    decoded = CODEC.decode(CODEC.encode(x), numel).double().numpy()
    apart = np.abs(decoded - reference(x.numpy()))
    # A scale between two bf16 numbers may round to the other one in fp32.
    assert np.mean(apart > 1e-6 * np.abs(decoded)) < 0.01 and apart.max() <= 2**-7 * np.abs(decoded).max()


def test_the_error_on_a_normal_vector_is_that_of_the_theory() -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    decoded = CODEC.decode(CODEC.encode(x), len(x))
    assert float((decoded - x).square().mean()) == pytest.approx(0.1175, rel=0.02)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scales_of_any_size_survive(scale: float) -> None:
    x = torch.randn(ROW, generator=torch.Generator().manual_seed(2)) * scale
    decoded = CODEC.decode(CODEC.encode(x), ROW)
    assert float((decoded / scale - x / scale).norm()) < 0.36 * float((x / scale).norm())


def test_zero_stays_zero_and_a_sum_that_overflows_is_refused() -> None:
    assert not CODEC.decode(CODEC.encode(torch.zeros(200)), 200).any()
    with pytest.raises(ProtocolViolation):
        CODEC.encode(torch.full((200,), 3e38))


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=34, max_size=34))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        assert bool(torch.isfinite(CODEC.decode(data, BLOCK)).all())
    except ProtocolViolation as error:
        assert "scale" in str(error)
