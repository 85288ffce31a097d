"""The casts in C against numpy, which has its own: every fp16 number, and where rounding changes between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.codecs import Codec, get_codec
from optim.codecs.interface import bytes_of
from tests.optim.kernels.messages import each_codec, message, refusing_torch, vector

FP16, BF16 = get_codec("fp16"), get_codec("bf16")
HALVES = np.concatenate([np.arange(0x7C00), np.arange(0x8000, 0xFC00)]).astype(np.uint16)  # all that are finite


def test_every_half_is_decoded_and_encoded_as_by_numpy() -> None:
    wanted = HALVES.view(np.float16).astype(np.float32)
    with refusing_torch():
        decoded = FP16.decode(HALVES.tobytes(), len(HALVES))
        again = FP16.encode(decoded)
    assert decoded.numpy().tobytes() == wanted.tobytes()
    assert bytes_of(again) == HALVES.tobytes()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_what_lies_between_two_halves_is_rounded_as_by_numpy(sign: int, distance: int) -> None:
    """The middle of each two, and the fp32 numbers beside it."""
    halves = HALVES[:0x7C00].view(np.float16).astype(np.float64)
    middle = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    x = (middle.view(np.int32) + distance).view(np.float32) * np.float32(sign)
    with refusing_torch():
        data = FP16.encode(torch.from_numpy(x))
    assert bytes_of(data) == x.astype(np.float16).tobytes()


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_is_rounded_to_the_nearest_and_of_two_to_the_even_one(low: int) -> None:
    """Every high half of an fp32 number; the sums are of integers, as the format is defined."""
    high = np.concatenate([np.arange(0x7F7F), np.arange(0x8000, 0xFF7F)]).astype(np.uint32)
    x = (high << 16 | low).astype(np.uint32).view(np.float32)
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    with refusing_torch():
        data = BF16.encode(torch.from_numpy(x))
        decoded = BF16.decode(data, len(x))
    assert bytes_of(data) == (high + up).astype(np.uint16).tobytes()
    assert decoded.numpy().tobytes() == ((high + up).astype(np.uint32) << 16).tobytes()


@each_codec
@pytest.mark.parametrize("numel", [1, 15, 17, 5000, 100_003])
def test_norms_are_those_of_a_sum_in_float64(codec: Codec, numel: int) -> None:
    messages = [bytes_of(codec.encode(vector(numel, 3, codec)))]
    if codec.name != "int8":  # with scales of more bits than ours, its decoded values are rounded
        messages.append(message(codec, numel))
    for data in messages:
        decoded = codec.decode(data, numel).numpy().astype(np.float64)
        assert codec.decoded_sqnorm(data, numel) == pytest.approx(np.sum(decoded**2), rel=1e-12, abs=0)
