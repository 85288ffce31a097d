"""two_bit in C against numpy: every byte, the order of its sums, and values at its threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import get_codec
from optim.codecs.interface import bytes_of
from optim.codecs.two_bit import LARGE, SMALL, THRESHOLD
from tests.optim.kernels.messages import both, refusing_torch, same_bits

CODEC = get_codec("two_bit")
BLOCK, QUARTER = 128, 32


def of_fp32(value: float) -> np.float32:
    return np.float32(value)


def block_sum(x: np.ndarray) -> np.float32:
    """Add the second half to the first one until one value is left."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return np.float32(x[0])


def encoded_block(x: np.ndarray) -> bytes:
    """Encode up to 128 values in fp32, an operation at a time."""
    count, x = np.float32(len(x)), np.concatenate([x, np.zeros(BLOCK - len(x), np.float32)])
    sizes = np.abs(x)
    total = block_sum(sizes)
    large = sizes > total / count * of_fp32(THRESHOLD)
    squares = count * of_fp32(SMALL**2) + np.float32(large.sum()) * of_fp32(LARGE**2 - SMALL**2)
    fitted = total * of_fp32(SMALL) + block_sum(sizes * large) * of_fp32(LARGE - SMALL)
    scale = torch.tensor(fitted / squares).bfloat16().view(torch.int16).numpy().tobytes()
    codes = (2 * large + (x >= 0)).astype(np.uint8).reshape(4, QUARTER)
    return scale + (codes << np.array([[0], [2], [4], [6]], np.uint8)).sum(0).astype(np.uint8).tobytes()


@pytest.mark.parametrize("count", [1, 2, 33, 127, BLOCK])
@pytest.mark.parametrize("seed", range(40))
def test_a_block_is_encoded_as_by_numpy(count: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    with refusing_torch():
        assert bytes_of(CODEC.encode(torch.from_numpy(x))) == encoded_block(x)


def test_every_byte_is_decoded_as_by_numpy() -> None:
    scales = np.array([0x3F80, 0x3EAA, 0x0001, 0x7B80, 0x8000, 0, 0x3DCC, 0x4148], np.uint16)  # 1, a third, ..., -0, 0
    data = np.arange(256, dtype=np.uint8)
    codes = data.reshape(8, 1, QUARTER) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    values = np.array([-SMALL, SMALL, -LARGE, LARGE], np.float32)[codes].reshape(8, BLOCK)
    wanted = values * (scales.astype(np.uint32) << 16).view(np.float32)[:, None]
    with refusing_torch():
        decoded = CODEC.decode(scales.tobytes() + data.tobytes(), 8 * BLOCK)
    assert decoded.numpy().tobytes() == wanted.tobytes()


@settings(max_examples=100, deadline=None)
@given(st.integers(2, BLOCK), st.floats(2.0**-20, 2.0**20, width=32), st.integers(-3, 3))
def test_values_at_the_threshold_are_encoded_alike(count: int, small: float, steps: int) -> None:
    """One value at the threshold, which it moves itself, and others of one size."""
    share = THRESHOLD / count
    x = torch.full((count,), small)
    x[count // 2] = share * (count - 1) * small / (1 - share)
    x[count // 2 : count // 2 + 1].view(torch.int32).add_(steps)
    with refusing_torch():
        here = CODEC.encode(x)
    assert same_bits(here, both(lambda: CODEC.encode(x))[1])


def test_scales_midway_between_two_are_rounded_to_the_even_one() -> None:
    """Blocks of one size, so that every magnitude is small and the scale is near that size / SMALL."""
    midway = (np.arange(0x3F80, 0x4180, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    near = (midway * of_fp32(SMALL)).view(np.uint32)[:, None] + np.arange(-2, 3, dtype=np.int64)
    sizes = near.astype(np.uint32).view(np.float32).reshape(-1)
    scales = (BLOCK * sizes * of_fp32(SMALL) / (BLOCK * of_fp32(SMALL**2))).view(np.uint32)
    ties, even = scales & 0xFFFF == 0x8000, scales & 0x10000 == 0
    assert (ties & even).sum() > 20
    assert (ties & ~even).sum() > 20
    for size, bits in zip(sizes[ties], scales[ties], strict=True):
        with refusing_torch():
            data = CODEC.encode(torch.full((BLOCK,), float(size)))
        assert int.from_bytes(bytes_of(data)[:2], "little") == (bits >> 16) + (bits >> 16 & 1)


@pytest.mark.parametrize("steps", [-8, 0, 8])
def test_scales_about_the_largest_are_refused_alike(steps: int) -> None:
    x = torch.full((BLOCK,), SMALL * 2.0**120)  # its scale is 2^120
    x.view(torch.int32).add_(steps)
    here, wanted = both(lambda: CODEC.encode(x))
    assert isinstance(here, str) == isinstance(wanted, str) == (steps > 0)
    assert here == wanted if isinstance(here, str) else same_bits(here, wanted)
