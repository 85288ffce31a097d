"""NF4, fp4, six-sigma int8, ternary, sign and top-k against their definitions, and error feedback."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import CODECS, ROW, Codec, get_codec
from optim.codecs.tables import NF4_VALUES
from peer.errors import ProtocolViolation
from tests.optim.reference.error_feedback import ErrorFeedback


def normal(numel: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def through(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x), len(x))


E3M0_VALUES = sorted([0.0, *(s * 2.0**-e for e in range(7) for s in (-1, 1))])


@pytest.mark.parametrize(("name", "block", "values"), [("nf4", 64, NF4_VALUES), ("fp4_e3m0", 128, E3M0_VALUES)])
def test_a_table_codec_takes_the_nearest_value(name: str, block: int, values: list[float]) -> None:
    x = normal(8 * ROW + 640).view(-1, block)
    x = x / x.abs().amax(1, keepdim=True)  # so that every scale is 1
    got = through(get_codec(name), x.reshape(-1).contiguous()).view(-1, block).numpy()
    distances = np.abs(x.numpy()[..., None] - np.array(values, dtype=np.float32))
    best = distances.min(-1)
    assert np.all(np.abs(got - x.numpy()) <= best + 1e-7)
    assert set(np.unique(got)) == {np.float32(v) for v in values}


def test_nf4_is_bitsandbytes_nf4() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = pytest.importorskip("bitsandbytes.functional")
        x = (normal(64 * 100) * 400).clamp(-1, 1)
        x[::64] = 1.0  # scales that fp32 and bf16 share
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        theirs = functional.dequantize_4bit(packed, state)
    assert torch.equal(through(get_codec("nf4"), x), theirs.flatten())


def test_six_sigma_decodes_to_the_means_of_its_bins() -> None:
    x = normal(1 << 16)
    x[5] = 1.0  # beyond six sigma: the outermost bin takes it
    wide = x.double().numpy()
    width = 12 * wide.std(ddof=1) / 256
    bins = np.clip(np.floor((wide - wide.mean()) / width + 128), 0, 255).astype(int)
    means = np.bincount(bins, weights=wide, minlength=256) / np.maximum(np.bincount(bins, minlength=256), 1)
    got = through(get_codec("int8_6sigma"), x).double().numpy()
    off = np.abs(got - means[bins]) > 1e-6 * np.abs(wide).max()
    assert off.mean() < 1e-3  # values on the edge of a bin
    assert got.mean() == pytest.approx(wide.mean(), rel=1e-4)


def test_sign_is_the_sign_times_the_mean_magnitude() -> None:
    for numel in (ROW, 100, 3):
        x = normal(numel)
        got = through(get_codec("sign"), x)
        assert torch.equal(got >= 0, x >= 0)
        assert got.abs().unique().tolist() == pytest.approx([float(x.abs().mean())], rel=2**-8)


def test_top_k_keeps_only_the_largest() -> None:
    x = normal(2 * ROW + 64 * 3)
    got = through(get_codec("topk"), x)
    for row, size in ((slice(0, ROW), 64), (slice(ROW, 2 * ROW), 64), (slice(2 * ROW, len(x)), 4)):
        places = x[row].abs().topk(size).indices.sort().values
        assert torch.equal(got[row].nonzero().flatten(), places)
        assert torch.allclose(got[row][places], x[row][places], rtol=2**-8)


@pytest.mark.parametrize("places", [b"\x00\x00\x00", b"\x02\x10\x00", b"\x01\xf0\xff"])  # twice, descending, beyond
def test_top_k_refuses_impossible_places(places: bytes) -> None:
    codec = get_codec("topk")
    data = bytearray(codec.encode(torch.tensor([1.0, 2.0, 3.0])).numpy().tobytes())
    assert len(data) == 7
    data[4:] = places
    with pytest.raises(ProtocolViolation, match="place"):
        codec.decode(data, 3)


def test_ternary_refuses_a_byte_of_more_than_five_trits() -> None:
    with pytest.raises(ProtocolViolation, match="trits"):
        get_codec("ternary").decode(b"\x00\x3f" + bytes([243]), 5)


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.unbiased], ids=lambda c: c.name)
def test_unbiased_codecs_are_unbiased_within_their_standard_error(codec: Codec) -> None:
    torch.manual_seed(11)
    x, trials = normal(ROW), 400
    total, squares = torch.zeros(ROW, dtype=torch.float64), torch.zeros(ROW, dtype=torch.float64)
    for _ in range(trials):
        got = through(codec, x).double()
        total += got
        squares += got**2
    mean = total / trials
    error = ((squares / trials - mean**2).clamp(min=0) / trials).sqrt()
    z = ((mean - x.double()) / (error + 1e-12)).abs()
    assert float(z.median()) < 1.0  # 0.67 for a normal deviate
    assert float((mean - x.double()).sum().abs()) <= 5 * float(error.square().sum().sqrt()) + 1e-9


@pytest.mark.parametrize("name", ["sign", "topk", "int4", "nf4"])
@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4), numel=st.integers(1, 3 * ROW))
def test_decoded_plus_kept_is_the_input(name: str, seeds: list[int], numel: int) -> None:
    codec = get_codec(name)
    feedback = ErrorFeedback(codec, numel)
    for seed in seeds:
        x = normal(numel, seed)
        wanted = feedback.residual + x
        sent = codec.decode(feedback.encode(x), numel)
        assert torch.allclose(sent + feedback.residual, wanted, rtol=2**-23, atol=1e-9)
        if name == "topk":
            assert torch.equal(sent + feedback.residual, wanted)  # no rounding at all


def test_error_feedback_delivers_everything_eventually() -> None:
    codec, x = get_codec("topk"), normal(ROW)
    feedback, total = ErrorFeedback(codec, ROW), torch.zeros(ROW)
    for _ in range(300):
        total += codec.decode(feedback.encode(x), ROW)
    assert float((total / 300 - x).norm() / x.norm()) < 0.2
    assert float((through(codec, x) - x).norm() / x.norm()) > 0.8  # without it, most is never sent


def test_a_refused_vector_does_not_change_the_residual() -> None:
    feedback = ErrorFeedback(get_codec("sign"), 8)
    feedback.encode(torch.arange(8.0))
    before = feedback.residual.clone()
    with pytest.raises(ProtocolViolation):
        feedback.encode(torch.full((8,), torch.inf))
    assert torch.equal(feedback.residual, before)
