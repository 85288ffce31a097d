"""Encoding, decoding and norms in C against the torch code, byte by byte."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, get_codec
from optim.codecs.blockwise import Int8
from optim.kernels.codec_kernels import KERNELS
from peer.errors import ProtocolViolation
from tests.optim.kernels.torch_only import torch_only

INT8 = get_codec("int8")
LENGTHS = (0, 1, 3, 31, 1000, 1024, ROW - 1, ROW, ROW + 1, 3 * ROW + 2048, 64 * ROW, 65 * ROW + 77)
REFUSED_SCALES = (math.nan, -math.nan, math.inf, -math.inf, -1.0, -1e-45, 3e38, 2.0**120 * (1 + 2**-23))
TAKEN_SCALES = (0.0, -0.0, 1e-45, 2.0**-126, 1 / 3, 2.0**120)


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What the kernels give and what torch gives: a result, or the words of the refusal."""

    def outcome() -> Any:
        try:
            return call()
        except ProtocolViolation as error:
            return str(error)

    here = outcome()
    with torch_only():
        return here, outcome()


def vector(numel: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(numel // ROW + 1, generator=generator).mul_(8).exp_().repeat_interleave(ROW)[:numel]
    return torch.randn(numel, generator=generator).mul_(spread)


def message(numel: int, scales: list[float], seed: int = 1) -> bytes:
    """Any q, -128 too, in rows with these scales."""
    random = np.random.default_rng(seed)
    rows = [min(ROW, numel - first) for first in range(0, numel, ROW)]
    packed = zip(rows, scales * len(rows), strict=False)
    return b"".join(struct.pack("<f", scale) + random.bytes(m) for m, scale in packed)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes()


def refusing_torch() -> Any:
    """Fail where the torch code runs, so that a test of the kernels is one."""
    return patch.object(Int8, "_chunks", side_effect=AssertionError("not the kernel"))


@pytest.mark.parametrize("numel", LENGTHS)
def test_bytes_and_norms_are_those_of_torch(numel: int) -> None:
    x = vector(numel)
    with refusing_torch():
        data, sqnorm = INT8.encode_with_sqnorm(x)
        found = INT8.decode(data, numel), INT8.decoded_sqnorm(data, numel), INT8.encode(x)
    with torch_only():
        wanted, wanted_sqnorm = INT8.encode_with_sqnorm(x)
        decoded = INT8.decode(wanted, numel)
    assert same_bits(data, wanted) and same_bits(found[2], wanted)
    assert same_bits(found[0], decoded)
    assert sqnorm == found[1] == pytest.approx(wanted_sqnorm, rel=1e-12, abs=0)


SPECIAL = {
    "zeros": torch.zeros(ROW + 5),
    "negative zeros": torch.full((ROW,), -0.0),
    "subnormal": torch.linspace(-1e-40, 1e-40, 2 * ROW + 9),
    "smallest scale": torch.linspace(-(2.0**-119), 2.0**-119, ROW),
    "halves": torch.arange(-254, 255) / 2 * 2.0**-10,
    "scale of 2^120": torch.linspace(-127 * 2.0**120, 127 * 2.0**120, 999),
    "a tie of the largest": torch.tensor([-3.0, 3.0] * 700),
}


@pytest.mark.parametrize("x", SPECIAL.values(), ids=SPECIAL.keys())
def test_special_values_have_the_same_bytes(x: torch.Tensor) -> None:
    (data, sqnorm), (wanted, wanted_sqnorm) = both(lambda: INT8.encode_with_sqnorm(x))
    assert same_bits(data, wanted)
    assert sqnorm == pytest.approx(wanted_sqnorm, rel=1e-12, abs=0)
    assert same_bits(*both(lambda: INT8.decode(data, len(x))))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, ROW - 1, ROW, ROW + 99])
def test_values_that_are_not_finite_are_refused_alike(bad: float, place: int) -> None:
    x = vector(ROW + 100)
    x[place] = bad
    for call in (INT8.encode, INT8.encode_with_sqnorm):
        here, wanted = both(partial(call, x))
        assert here == wanted and "not finite" in here


def test_huge_values_are_encoded_alike_and_their_scale_is_refused_alike() -> None:
    x = torch.full((ROW,), 3.4e38)
    assert same_bits(*both(lambda: INT8.encode(x)))
    here, wanted = both(lambda: INT8.encode_with_sqnorm(x))
    assert here == wanted and "scale" in here


@pytest.mark.parametrize("scale", REFUSED_SCALES)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_scales_are_refused_alike(scale: float, row: int) -> None:
    numel, scales = 2 * ROW + 100, [1.0, 1.0, 1.0]
    scales[row] = scale
    data = message(numel, scales)
    for call in (INT8.decode, INT8.decoded_sqnorm):
        here, wanted = both(partial(call, data, numel))
        assert here == wanted and "negative, infinite or not a number" in here


@pytest.mark.parametrize("scale", TAKEN_SCALES)
def test_any_bytes_with_a_good_scale_decode_alike(scale: float) -> None:
    numel = ROW + 333
    data = message(numel, [scale])
    with refusing_torch():
        decoded, sqnorm = INT8.decode(data, numel), INT8.decoded_sqnorm(data, numel)
    with torch_only():
        assert same_bits(decoded, INT8.decode(data, numel))
        assert sqnorm == pytest.approx(INT8.decoded_sqnorm(data, numel), rel=1e-12, abs=0)


@pytest.mark.parametrize("call", [INT8.decode, INT8.decoded_sqnorm])
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_length_is_refused_alike(call: Callable[[bytes, int], Any], difference: int) -> None:
    data = bytes(INT8.encoded_size(ROW + 1) + difference)
    here, wanted = both(lambda: call(data, ROW + 1))
    assert here == wanted and "bytes instead of" in here


@pytest.mark.parametrize("offset", range(9))
def test_a_message_may_begin_at_any_byte(offset: int) -> None:
    numel = 2 * ROW + 5
    data = bytes(offset) + message(numel, [0.25])
    view = memoryview(data)[offset:]
    assert same_bits(*both(lambda: INT8.decode(view, numel)))
    assert same_bits(*both(lambda: INT8.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)[offset:], numel)))
    out = torch.zeros(len(data), dtype=torch.uint8)
    INT8.encode(vector(numel), out[offset:])
    assert same_bits(out[offset:], INT8.encode(vector(numel))) and not out[:offset].any()


@pytest.mark.parametrize("offset", range(1, 5))
def test_a_vector_may_begin_at_any_value(offset: int) -> None:
    x = vector(ROW + 100)[offset:]
    (data, _), (wanted, _) = both(lambda: INT8.encode_with_sqnorm(x))
    assert same_bits(data, wanted)
    out = torch.zeros(len(x) + offset)
    INT8.decode(data, len(x), out[offset:])
    assert same_bits(out[offset:], INT8.decode(data, len(x))) and not out[:offset].any()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.integers(1, 2 * ROW),
    st.binary(min_size=8, max_size=60),
)
def test_any_values_and_any_bytes(values: list[float], numel: int, raw: bytes) -> None:
    x = torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()
    here, wanted = both(lambda: INT8.encode(x))
    assert here == wanted if isinstance(wanted, str) else same_bits(here, wanted)
    for call in (INT8.encode_with_sqnorm, lambda x: (x, INT8.decoded_sqnorm(raw, len(raw) - 4))):
        here, wanted = both(partial(call, x))
        if isinstance(wanted, str):
            assert here == wanted
        else:
            assert same_bits(here[0], wanted[0]) and here[1] == pytest.approx(wanted[1], rel=1e-12, abs=0)


def test_they_are_here() -> None:
    """A set-up has a compiler: tools/check_system.sh asks for one."""
    assert set(KERNELS) == {"int8"}


def test_other_codecs_and_other_rows_are_left_to_torch() -> None:
    class Fine(Int8):
        name = "int8 of 256"
        row = 256

    x = vector(1000)
    data = Fine().encode(x)
    with torch_only():
        assert same_bits(data, Fine().encode(x)) and len(data) == 4 * 4 + 1000


def test_another_device_type_is_left_to_torch() -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):  # no data: the kernels would not have noticed
        INT8.encode(torch.empty(10, device="meta"))
