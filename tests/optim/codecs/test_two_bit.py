"""Two bits a value: the levels, the error, extreme scales, hostile bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, get_codec
from optim.codecs.two_bit import LARGE, SMALL
from peer.errors import ProtocolViolation
from tests.optim.reference.codecs import best_magnitudes

CODEC = get_codec("two_bit")
BLOCK = 128


def test_the_levels_are_the_best_ones_of_a_normal() -> None:
    assert best_magnitudes() == pytest.approx((SMALL, LARGE), rel=1e-9)


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
