"""What every codec of the registry promises, checked for each of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import CODECS, ROW, Codec, get_codec
from optim.codecs.rows import CHUNK_CPU
from peer.errors import ConfigError, ProtocolViolation

ALL = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
CHUNK = CHUNK_CPU
SIZES = [0, 1, 2, 127, 129, ROW - 1, ROW, ROW + 1, 3 * ROW + 77, CHUNK, CHUNK + ROW + 5]


def encoded(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return codec.encode(x)


def heavy_tailed(numel: int, seed: int = 0, scale: float = 1e-3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).pow_(3).mul_(scale)


@ALL
@pytest.mark.parametrize("numel", SIZES)
def test_size_depends_on_numel_alone(codec: Codec, numel: int) -> None:
    data = codec.encode(heavy_tailed(numel))
    assert data.dtype == torch.uint8
    assert data.shape == (codec.encoded_size(numel),)
    assert codec.decode(data, numel).shape == (numel,)
    whole = 8 * max(codec.granule, ROW)
    assert 8 * codec.encoded_size(whole) == codec.bits_per_value * whole


@ALL
def test_all_kinds_of_buffers_decode_alike(codec: Codec) -> None:
    x = heavy_tailed(5000)
    data = codec.encode(x)
    wanted = codec.decode(data, 5000)
    plain = data.numpy().tobytes()
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]  # not aligned to any dtype
    for form in (plain, bytearray(plain), memoryview(plain), memoryview(b"abc" + plain)[3:], shifted):
        assert torch.equal(codec.decode(form, 5000), wanted)


@ALL
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(0, CHUNK // ROW + 2), max_size=4), tail=st.integers(0, 300))
def test_pieces_cut_at_granules_encode_like_the_whole(codec: Codec, cuts: list[int], tail: int) -> None:
    numel = CHUNK + 2 * ROW + tail
    x = heavy_tailed(numel)
    grain = -(-ROW // codec.granule) * codec.granule
    edges = sorted({0, numel, *(min(c * grain, numel) for c in cuts)})
    torch.manual_seed(0)  # for codecs that draw
    pieces = [codec.encode(x[a:b]) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(pieces), encoded(codec, x))


@ALL
def test_encode_into_a_callers_buffer(codec: Codec) -> None:
    x = heavy_tailed(ROW + 9)
    out = torch.full((codec.encoded_size(len(x)),), 255, dtype=torch.uint8)
    torch.manual_seed(0)
    assert codec.encode(x, out) is out
    assert torch.equal(out, encoded(codec, x))
    target = torch.full((len(x),), math.nan)
    assert codec.decode(out, len(x), target) is target
    assert torch.equal(target, codec.decode(out, len(x)))
    with pytest.raises(ValueError, match="bytes"):
        codec.encode(x, torch.empty(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="has 5 values"):
        codec.decode(out, len(x), torch.empty(5))


@ALL
def test_encode_does_not_change_its_input(codec: Codec) -> None:
    x = heavy_tailed(2 * ROW + 9)
    before = x.clone()
    codec.encode_with_sqnorm(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.idempotent], ids=lambda c: c.name)
@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**14), 2.0**14, width=32), max_size=300),
    exponent=st.integers(-140, 0),
)
def test_coding_a_decoded_vector_again_changes_nothing(codec: Codec, values: list[float], exponent: int) -> None:
    x = torch.tensor(values, dtype=torch.float32) * 2.0**exponent
    once = codec.encode(x)
    decoded = codec.decode(once, len(x))
    assert torch.equal(codec.decode(codec.encode(decoded), len(x)), decoded)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, ROW + 3, CHUNK + 1])
def test_a_value_that_is_not_finite_is_never_encoded(codec: Codec, bad: float, where: int) -> None:
    x = heavy_tailed(CHUNK + 7)
    x[where] = bad
    with pytest.raises(ProtocolViolation, match="not finite"):
        codec.encode(x)


@ALL
def test_the_wrong_number_of_bytes_is_refused(codec: Codec) -> None:
    data = codec.encode(heavy_tailed(500))
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data[:0]):
        with pytest.raises(ProtocolViolation, match="bytes instead of"):
            codec.decode(wrong, 500)
        with pytest.raises(ProtocolViolation, match="bytes instead of"):
            codec.decoded_sqnorm(wrong, 500)


@ALL
@settings(max_examples=30, deadline=None)
@given(data=st.data(), numel=st.integers(0, 300))
def test_any_bytes_decode_to_finite_values_or_are_refused(codec: Codec, data: st.DataObject, numel: int) -> None:
    size = codec.encoded_size(numel)
    raw = data.draw(st.one_of(st.binary(min_size=size, max_size=size), st.just(b"\xff" * size), st.just(bytes(size))))
    try:
        values = codec.decode(raw, numel)
    except ProtocolViolation:
        with pytest.raises(ProtocolViolation):
            codec.decoded_sqnorm(raw, numel)
    else:
        assert bool(torch.isfinite(values).all())
        assert codec.decoded_sqnorm(raw, numel) >= 0


@ALL
@pytest.mark.parametrize("numel", [0, 5, ROW + 100, CHUNK + 3])
def test_square_norm_is_that_of_the_decoded_values(codec: Codec, numel: int) -> None:
    x = heavy_tailed(numel)
    torch.manual_seed(0)
    data, sqnorm = codec.encode_with_sqnorm(x)
    assert torch.equal(data, encoded(codec, x))
    wanted = float(np.square(codec.decode(data, numel).numpy().astype(np.float64)).sum())
    assert sqnorm == pytest.approx(wanted, rel=1e-12)
    assert codec.decoded_sqnorm(data, numel) == pytest.approx(wanted, rel=1e-12)


@ALL
def test_zeros_stay_zeros(codec: Codec) -> None:
    data, sqnorm = codec.encode_with_sqnorm(torch.zeros(ROW + 50))
    assert sqnorm == 0
    assert not codec.decode(data, ROW + 50).any()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"fp32, fp16.*int8"):
        get_codec("int9")


def test_only_flat_fp32_vectors_are_accepted() -> None:
    for x in (torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="flat contiguous fp32"):
            get_codec("int8").encode(x)
