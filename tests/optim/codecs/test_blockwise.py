"""The error bounds, bytes and refusals of int8 and int4."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from optim.codecs import ROW, get_codec
from peer.errors import ProtocolViolation


def vector(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize(("name", "block", "qmax", "slack"), [("int8", ROW, 127, 2**-16), ("int4", 128, 7, 2**-7)])
def test_error_is_within_half_a_step(name: str, block: int, qmax: int, slack: float) -> None:
    x = vector(8 * ROW).pow(3)
    codec = get_codec(name)
    error = (codec.decode(codec.encode(x), len(x)).double() - x.double()).abs().view(-1, block).amax(1)
    half_step = x.double().view(-1, block).abs().amax(1) / qmax / 2
    assert bool((error <= half_step * (1 + slack) * (1 + 1e-6)).all())


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.01), ("int4", 0.12)])
def test_relative_error_on_normal_values(name: str, bound: float) -> None:
    x = vector(64 * ROW)
    codec = get_codec(name)
    error = codec.decode(codec.encode(x), len(x)) - x
    assert float(error.norm() / x.norm()) < bound


def test_small_updates_keep_their_precision() -> None:
    """fp16 scales would be subnormal here: that is why int4 has bf16 ones."""
    x = vector(ROW) * 1e-6
    codec = get_codec("int4")
    error = codec.decode(codec.encode(x), ROW) - x
    assert float(error.norm() / x.norm()) < 0.12


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38])
def test_an_impossible_scale_is_refused(name: str, scale: float) -> None:
    codec = get_codec(name)
    data = bytearray(codec.encode(vector(128)).numpy().tobytes())
    field = struct.pack("<f", scale)
    data[: 4 if name == "int8" else 2] = field if name == "int8" else field[2:]
    with pytest.raises(ProtocolViolation, match="scale"):
        codec.decode(data, 128)


def test_the_bytes_of_int8_and_int4_are_as_documented() -> None:
    x = torch.zeros(ROW)
    x[0], x[1], x[ROW // 2] = 127.0, -3.0, 127.0
    data = get_codec("int8").encode(x).numpy().tobytes()
    assert data[:8] == struct.pack("<fbbbb", 1.0, 127, -3, 0, 0)
    x = torch.zeros(ROW)
    x[0], x[1], x[ROW // 2], x[ROW // 2 + 2] = 7.0, -3.0, -7.0, 2.0
    data = get_codec("int4").encode(x).numpy().tobytes()
    assert len(data) == 64 + 2048
    assert data[:2] == struct.pack("<f", 1.0)[2:]
    assert struct.unpack("<bbb", data[64:67]) == (16 * -7 + 7, -3, 16 * 2)


def test_fp16_refuses_overflow_and_bf16_does_not() -> None:
    x = torch.tensor([1.0, 70000.0])
    with pytest.raises(ProtocolViolation, match="too large for fp16"):
        get_codec("fp16").encode(x)
    codec = get_codec("bf16")
    assert codec.decode(codec.encode(x), 2).tolist() == pytest.approx([1.0, 70000.0], rel=2**-8)
