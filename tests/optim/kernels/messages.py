"""What the tests code and decode: vectors and any bytes, of every codec that has kernels."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
import torch

from optim.codecs import ROW, Codec, get_codec
from optim.codecs.rows import RowCodec
from peer.errors import ProtocolViolation
from tests.optim.kernels.torch_only import torch_only

NAMES: Final = ("int8", "int4", "two_bit", "fp16", "bf16", "fp32")
BLOCK_BYTES: Final = {"int4": 64, "two_bit": 32}
"""The bytes of a block's values, in codecs that have a bf16 scale for each 128."""
LENGTHS: Final = (0, 1, 3, 31, 1000, 1024, ROW - 1, ROW, ROW + 1, 3 * ROW + 2048, 64 * ROW, 65 * ROW + 77)
BAD_SCALES: Final = (math.nan, -math.nan, math.inf, -math.inf, -1.0, -1e-45, 3e38, 2.0**120 * (1 + 2**-23))
FP16_MAX: Final = 65520 - 2.0**-8  # the largest fp32 that is not rounded to infinity
each_codec = pytest.mark.parametrize("codec", [get_codec(name) for name in NAMES], ids=NAMES)


def vector(numel: int, seed: int = 1, codec: Codec | None = None) -> torch.Tensor:
    """Values of very different magnitudes, in the codec's range."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(numel // ROW + 1, generator=generator).mul_(8).exp_().repeat_interleave(ROW)[:numel]
    x = torch.randn(numel, generator=generator).mul_(spread)
    return x.clamp_(-FP16_MAX, FP16_MAX) if codec is not None and codec.name == "fp16" else x


def int8_message(numel: int, scales: list[float], seed: int = 1) -> bytes:
    """Any q, -128 too, in rows with these scales."""
    random = np.random.default_rng(seed)
    rows = [min(ROW, numel - first) for first in range(0, numel, ROW)]
    packed = zip(rows, scales * len(rows), strict=False)
    return b"".join(struct.pack("<f", scale) + random.bytes(m) for m, scale in packed)


def blocks_message(block_bytes: int, numel: int, seed: int = 1) -> bytes:
    """Any bytes for the values of int4 and two_bit, those too that no encoder writes; scales up to 2^120, and subnormal
    ones."""
    random, rows = np.random.default_rng(seed), []
    for m in (min(ROW, numel - first) for first in range(0, numel, ROW)):
        blocks = -(-m // 128)
        rows.append(random.integers(0, 0x7B81, blocks, np.uint16).tobytes() + random.bytes(block_bytes * blocks))
    return b"".join(rows)


def message(codec: Codec, numel: int, seed: int = 1) -> bytes:
    """Any bytes that the codec decodes: subnormal numbers, negative zeros, several scales."""
    if codec.name == "int8":
        return int8_message(numel, [0.1, 0.7, 1e-3, 2e5], seed)
    if codec.name in BLOCK_BYTES:
        return blocks_message(BLOCK_BYTES[codec.name], numel, seed)
    dtype = np.dtype(np.uint32 if codec.name == "fp32" else np.uint16)
    words = np.frombuffer(bytearray(np.random.default_rng(seed).bytes(codec.encoded_size(numel))), dtype)
    top = {"fp16": 0x4000, "bf16": 0x4000, "fp32": 0x40000000}[codec.name]
    return (words & ~words.dtype.type(top)).tobytes()  # the exponent's highest bit: magnitudes below 2


def bad_messages(codec: Codec, numel: int, place: int) -> list[bytes]:
    """Messages that no peer may take, for the value at `place`."""
    if codec.name == "int8":
        rows = -(-numel // ROW)
        return [
            int8_message(numel, [scale if row == place // ROW else 1.0 for row in range(rows)]) for scale in BAD_SCALES
        ]
    found = []
    for pattern in BAD_WORDS[codec.name]:
        data = bytearray(message(codec, numel))
        size = 4 if codec.name == "fp32" else 2
        scale_at = codec.encoded_size(place // ROW * ROW) + place % ROW // 128 * 2
        at = scale_at if codec.name in BLOCK_BYTES else place * size
        data[at : at + size] = pattern.to_bytes(size, "little")
        found.append(bytes(data))
    return found


BAD_SCALE_WORDS: Final = (0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0xBF80, 0x8001, 0x7B81)  # bf16
BAD_WORDS: Final = {
    "int4": BAD_SCALE_WORDS,
    "two_bit": BAD_SCALE_WORDS,
    "fp16": (0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF),
    "bf16": (0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF),
    "fp32": (0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF),
}
"""Infinities, numbers that are none, and other scales that are refused."""


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


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes()


def refusing_torch() -> Any:
    """Fail where the torch code runs, so that a test of the kernels is one."""
    return patch.object(RowCodec, "_chunks", side_effect=AssertionError("not the kernel"))
