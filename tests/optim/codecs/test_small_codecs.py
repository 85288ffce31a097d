"""NF4 against bitsandbytes, what ternary and top-k promise and refuse, and error feedback."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import CODECS, ROW, Codec, get_codec
from optim.strategies.dense import DenseCoding, Feedback
from peer.errors import ProtocolViolation


def normal(numel: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def through(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x), len(x))


def test_nf4_is_bitsandbytes_nf4() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = pytest.importorskip("bitsandbytes.functional")
        x = (normal(64 * 100) * 400).clamp(-1, 1)
        x[::64] = 1.0  # scales that fp32 and bf16 share
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        theirs = functional.dequantize_4bit(packed, state)
    assert torch.equal(through(get_codec("nf4"), x), theirs.flatten())


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


class Sender:
    """A peer that sends vectors in one slice, with error feedback."""

    def __init__(self, name: str, numel: int) -> None:
        self.coding = DenseCoding([slice(0, numel)], get_codec(name), get_codec("fp32"))
        self.feedback = Feedback()
        assert self.coding.count == 1

    @property
    def residual(self) -> torch.Tensor:
        return self.feedback.memory(self.coding)[0]

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the others decode."""
        out = torch.empty(self.coding.message_bytes(0), dtype=torch.uint8)
        self.feedback.encode(self.coding, x, [out])
        return self.coding.up.decode(out, len(x))


@pytest.mark.parametrize("name", ["sign", "topk"])
@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4), numel=st.integers(1, 3 * ROW))
def test_decoded_plus_kept_is_the_input(name: str, seeds: list[int], numel: int) -> None:
    sender = Sender(name, numel)
    for seed in seeds:
        x = normal(numel, seed)
        wanted = sender.residual + x
        sent = sender.send(x)
        assert torch.allclose(sent + sender.residual, wanted, rtol=2**-23, atol=1e-9)
        if name == "topk":
            assert torch.equal(sent + sender.residual, wanted)  # no rounding at all


def test_error_feedback_delivers_everything_eventually() -> None:
    sender, x, total = Sender("topk", ROW), normal(ROW), torch.zeros(ROW)
    for _ in range(300):
        total += sender.send(x)
    assert float((total / 300 - x).norm() / x.norm()) < 0.2
    assert float((through(get_codec("topk"), x) - x).norm() / x.norm()) > 0.8  # without it, most is never sent


def test_a_refused_vector_does_not_change_the_residual() -> None:
    sender = Sender("sign", 8)
    sender.send(torch.arange(8.0))
    before = sender.residual.clone()
    assert before.any()
    with pytest.raises(ProtocolViolation):
        sender.send(torch.full((8,), torch.inf))
    assert torch.equal(sender.residual, before)
