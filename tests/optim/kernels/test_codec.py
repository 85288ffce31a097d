"""Encoding, decoding and norms in C against the torch code, byte by byte."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, Codec, get_codec
from optim.codecs.blockwise import Int8
from optim.kernels.codec_kernels import KERNELS
from tests.optim.kernels.messages import (
    FP16_MAX,
    LENGTHS,
    NAMES,
    bad_messages,
    both,
    each_codec,
    int8_message,
    message,
    refusing_torch,
    same_bits,
    vector,
)
from tests.optim.kernels.torch_only import torch_only

INT8 = get_codec("int8")
TAKEN_SCALES = (0.0, -0.0, 1e-45, 2.0**-126, 1 / 3, 2.0**120)


@each_codec
@pytest.mark.parametrize("numel", LENGTHS)
def test_bytes_and_norms_are_those_of_torch(codec: Codec, numel: int) -> None:
    x = vector(numel, codec=codec)
    with refusing_torch():
        data, sqnorm = codec.encode_with_sqnorm(x)
        found = codec.decode(data, numel), codec.decoded_sqnorm(data, numel), codec.encode(x)
    with torch_only():
        wanted, wanted_sqnorm = codec.encode_with_sqnorm(x)
        decoded = codec.decode(wanted, numel)
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
    "around fp16's smallest": torch.linspace(-(2.0**-22), 2.0**-22, 12_345),
    "around fp16's smallest normal": torch.linspace(2.0**-15, 2.0**-13, 12_345),
    "fp16's largest": torch.linspace(-FP16_MAX, FP16_MAX, 12_345),
}


@each_codec
@pytest.mark.parametrize("x", SPECIAL.values(), ids=SPECIAL.keys())
def test_special_values_have_the_same_bytes(codec: Codec, x: torch.Tensor) -> None:
    here, there = both(lambda: codec.encode_with_sqnorm(x))
    if isinstance(there, str):
        bounds = {"fp16": FP16_MAX, "int4": 7 * 2.0**120, "two_bit": 2.0**120}
        assert here == there and float(x.abs().max()) > bounds[codec.name]
        return
    (data, sqnorm), (wanted, wanted_sqnorm) = here, there
    assert same_bits(data, wanted)
    assert sqnorm == pytest.approx(wanted_sqnorm, rel=1e-12, abs=0)
    assert same_bits(*both(lambda: codec.decode(data, len(x))))


@each_codec
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, ROW - 1, ROW, ROW + 99])
def test_values_that_are_not_finite_are_refused_alike(codec: Codec, bad: float, place: int) -> None:
    x = vector(ROW + 100, codec=codec)
    x[place] = bad
    for call in (codec.encode, codec.encode_with_sqnorm):
        here, wanted = both(partial(call, x))
        assert here == wanted and "not finite" in here


def test_huge_values_are_encoded_alike_and_their_scale_is_refused_alike() -> None:
    x = torch.full((ROW,), 3.4e38)
    assert same_bits(*both(lambda: INT8.encode(x)))
    here, wanted = both(lambda: INT8.encode_with_sqnorm(x))
    assert here == wanted and "scale" in here


@pytest.mark.parametrize(("name", "largest"), [("fp16", 65520.0), ("bf16", 3.3962e38)])
@pytest.mark.parametrize("place", [0, 7, ROW, ROW + 99])
def test_values_that_a_cast_makes_infinite_are_refused_alike(name: str, largest: float, place: int) -> None:
    codec, x = get_codec(name), torch.ones(ROW + 100)
    for x[place] in (largest, -largest, 3.4e38):
        here, wanted = both(partial(codec.encode, x))
        assert here == wanted and f"too large for {name}" in here


@each_codec
@pytest.mark.parametrize("place", [0, ROW + 1, 2 * ROW + 99])
def test_bad_messages_are_refused_alike(codec: Codec, place: int) -> None:
    numel = 2 * ROW + 100
    for data in bad_messages(codec, numel, place):
        for call in (codec.decode, codec.decoded_sqnorm):
            here, wanted = both(partial(call, data, numel))
            assert here == wanted and "infinite or not a number" in here


@each_codec
@pytest.mark.parametrize("numel", LENGTHS)
def test_any_good_bytes_decode_alike(codec: Codec, numel: int) -> None:
    data = message(codec, numel)
    with refusing_torch():
        decoded, sqnorm = codec.decode(data, numel), codec.decoded_sqnorm(data, numel)
    with torch_only():
        assert same_bits(decoded, codec.decode(data, numel))
        assert sqnorm == pytest.approx(codec.decoded_sqnorm(data, numel), rel=1e-12, abs=0)


@pytest.mark.parametrize("scale", TAKEN_SCALES)
def test_any_bytes_with_a_good_scale_decode_alike(scale: float) -> None:
    numel = ROW + 333
    data = int8_message(numel, [scale])
    with refusing_torch():
        decoded, sqnorm = INT8.decode(data, numel), INT8.decoded_sqnorm(data, numel)
    with torch_only():
        assert same_bits(decoded, INT8.decode(data, numel))
        assert sqnorm == pytest.approx(INT8.decoded_sqnorm(data, numel), rel=1e-12, abs=0)


def test_every_byte_of_int4_is_decoded_as_by_numpy() -> None:
    """Those too that no encoder writes, whose low half would be 8 or -8."""
    scales = np.array([0x3F80, 0x3EAA, 0x0001, 0x7B80], np.uint16)  # 1, a third, the smallest, 2^120
    both = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    high = np.round(both / np.float32(16))
    scale = (scales.astype(np.uint32) << 16).view(np.float32).repeat(128)
    wanted = np.concatenate([both - 16 * high, high]) * scale
    with refusing_torch():
        decoded = get_codec("int4").decode(scales.tobytes() + bytes(range(256)), 512)
    assert decoded.numpy().tobytes() == wanted.tobytes()


@each_codec
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_length_is_refused_alike(codec: Codec, difference: int) -> None:
    data = bytes(codec.encoded_size(ROW + 1) + difference)
    for call in (codec.decode, codec.decoded_sqnorm):
        here, wanted = both(partial(call, data, ROW + 1))
        assert here == wanted and "bytes instead of" in here


@each_codec
@pytest.mark.parametrize("offset", range(9))
def test_a_message_may_begin_at_any_byte(codec: Codec, offset: int) -> None:
    numel = 2 * ROW + 5
    data = bytes(offset) + message(codec, numel)
    view = memoryview(data)[offset:]
    assert same_bits(*both(lambda: codec.decode(view, numel)))
    assert same_bits(*both(lambda: codec.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8)[offset:], numel)))
    out, x = torch.zeros(len(data), dtype=torch.uint8), vector(numel, codec=codec)
    codec.encode(x, out[offset:])
    assert same_bits(out[offset:], codec.encode(x)) and not out[:offset].any()


@each_codec
@pytest.mark.parametrize("offset", range(1, 5))
def test_a_vector_may_begin_at_any_value(codec: Codec, offset: int) -> None:
    x = vector(ROW + 100, codec=codec)[offset:]
    (data, _), (wanted, _) = both(lambda: codec.encode_with_sqnorm(x))
    assert same_bits(data, wanted)
    out = torch.zeros(len(x) + offset)
    codec.decode(data, len(x), out[offset:])
    assert same_bits(out[offset:], codec.decode(data, len(x))) and not out[:offset].any()


@each_codec
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.integers(1, 2 * ROW),
    st.binary(min_size=8, max_size=200),
)
def test_any_values_and_any_bytes(codec: Codec, values: list[float], numel: int, raw: bytes) -> None:
    x = torch.tensor(values).repeat(-(-numel // len(values)))[:numel].contiguous()
    here, wanted = both(lambda: codec.encode(x))
    assert here == wanted if isinstance(wanted, str) else same_bits(here, wanted)
    received = next(n for n in range(2 * len(raw), -1, -1) if codec.encoded_size(n) <= len(raw))
    data = raw[: codec.encoded_size(received)]
    for call in (codec.encode_with_sqnorm, lambda x: (x, codec.decoded_sqnorm(data, received))):
        here, wanted = both(partial(call, x))
        if isinstance(wanted, str):
            assert here == wanted
        else:
            assert same_bits(here[0], wanted[0]) and here[1] == pytest.approx(wanted[1], rel=1e-12, abs=0)


def test_they_are_here() -> None:
    """A set-up has a compiler: tools/check_system.sh asks for one."""
    assert set(KERNELS) == set(NAMES)


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
