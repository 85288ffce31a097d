"""The mean in C against the torch code, and the order of the messages."""

from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, Codec, get_codec
from optim.codecs.interface import bytes_of, order_by_bytes
from optim.merge import contribution_weights, merge_part
from peer.errors import ProtocolViolation
from tests.optim.kernels.messages import (
    LENGTHS,
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


@each_codec
@pytest.mark.parametrize(
    ("weights", "numel"),
    [
        *(([0.1, 0.0, 0.2, 0.7], numel) for numel in LENGTHS),
        *(([1.0], numel) for numel in LENGTHS[::3]),
        *(([1 / 48] * 48, numel) for numel in LENGTHS[1::3]),
    ],
    ids=lambda value: f"{len(value)} messages" if isinstance(value, list) else None,
)
def test_the_result_is_that_of_torch(codec: Codec, numel: int, weights: list[float]) -> None:
    messages = [codec.encode(vector(numel, seed, codec)) for seed in range(len(weights))]
    with refusing_torch():
        merged = merge_part(codec, messages, weights, numel, codec)
    with torch_only():
        assert same_bits(merged, merge_part(codec, messages, weights, numel, codec))


@each_codec
def test_clipped_weights_and_messages_that_begin_anywhere(codec: Codec) -> None:
    numel = 2 * ROW + 1
    weights = contribution_weights([100, 130, 90, 110], [1.0, 1.1, 2.0, 0.9])
    assert sum(weights) < 0.99, "one is clipped"
    views = [memoryview(bytes(k) + message(codec, numel, k))[k:] for k in range(4)]
    assert same_bits(*both(lambda: merge_part(codec, views, weights, numel, codec)))


def test_each_operation_is_rounded_alone() -> None:
    """Against numpy, an operation at a time: a fused multiply-add would differ in about a tenth of the sums."""
    numel, weights = ROW, [0.3, 0.6, 0.1]
    messages = [int8_message(numel, [scale], seed) for seed, scale in enumerate((1 / 3, 0.1, 7e-3))]
    total = np.zeros(numel, np.float32)
    for k, (data, weight) in enumerate(zip(messages, weights, strict=True)):
        scale = np.frombuffer(data, np.float32, 1)[0]
        term = np.frombuffer(data, np.int8, numel, 4).astype(np.float32) * scale * np.float32(weight)
        total = term if k == 0 else total + term
    wanted = INT8.encode(torch.from_numpy(total))
    assert same_bits(merge_part(INT8, messages, weights, numel, INT8), wanted)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", np.float16), ("fp32", np.float32)])
def test_the_operations_of_casts_are_those_of_numpy(name: str, dtype: type[np.floating]) -> None:
    codec, numel, weights = get_codec(name), ROW, [0.3, 0.6, 0.1]
    messages = [message(codec, numel, seed) for seed in range(3)]
    total = np.zeros(numel, np.float32)
    for k, (data, weight) in enumerate(zip(messages, weights, strict=True)):
        term = np.frombuffer(data, dtype).astype(np.float32) * np.float32(weight)
        total = term if k == 0 else total + term
    assert bytes_of(merge_part(codec, messages, weights, numel, codec)) == total.astype(dtype).tobytes()


@each_codec
@pytest.mark.parametrize("place", [0, 2])
def test_a_bad_message_is_refused_alike(codec: Codec, place: int) -> None:
    numel = 2 * ROW
    messages = [message(codec, numel, k) for k in range(3)]
    for messages[place] in bad_messages(codec, numel, ROW + 9):
        here, wanted = both(lambda: merge_part(codec, messages, [1 / 3] * 3, numel, codec))
        assert here == wanted and "infinite or not a number" in here


def test_a_sum_that_is_not_finite_is_refused_alike() -> None:
    messages = [int8_message(ROW, [2.0**120], k) for k in range(2)]
    here, wanted = both(lambda: merge_part(INT8, messages, [1e30, 1e30], ROW, INT8))
    assert here == wanted and "not finite" in here


@pytest.mark.parametrize(("name", "weight"), [("fp16", 1.0), ("bf16", 1e38), ("fp32", 1e38)])
def test_a_sum_that_a_cast_cannot_hold_is_refused_alike(name: str, weight: float) -> None:
    codec = get_codec(name)
    messages = [codec.encode(torch.full((ROW,), 65504.0))] * 2
    here, wanted = both(lambda: merge_part(codec, messages, [weight] * 2, ROW, codec))
    assert here == wanted and ("too large" in here or "not finite" in here)


@each_codec
def test_a_wrong_length_is_refused(codec: Codec) -> None:
    with pytest.raises(ProtocolViolation, match="bytes instead of"):
        merge_part(codec, [message(codec, ROW), message(codec, ROW - 128)], [0.5, 0.5], ROW, codec)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3 * ROW),
    st.lists(st.tuples(st.floats(0, 2.0**121, width=32), st.floats(0, 1)), min_size=1, max_size=6),
)
def test_any_scales_and_weights(numel: int, parts: list[tuple[float, float]]) -> None:
    messages = [int8_message(numel, [scale], k) for k, (scale, _) in enumerate(parts)]
    here, wanted = both(lambda: merge_part(INT8, messages, [weight for _, weight in parts], numel, INT8))
    assert here == wanted if isinstance(wanted, str) else same_bits(here, wanted)


@each_codec
def test_other_result_codecs_are_left_to_torch(codec: Codec) -> None:
    messages = [codec.encode(vector(5000, k, codec)) for k in range(3)]
    for down in (get_codec("int8_6sigma"), get_codec("nf4")):
        assert same_bits(*both(partial(merge_part, codec, messages, [0.2, 0.3, 0.5], 5000, down)))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([b"", b"a", b"b", b"ab"]), st.sampled_from([0.25, 0.5])), max_size=8),
    st.sampled_from([0, 1, 4095, 4096, 4097, 10_000]),
)
def test_messages_are_ordered_as_their_bytes_are(ends: list[tuple[bytes, float]], same: int) -> None:
    """`same`: bytes that all begin with."""
    messages, weights = [bytes(same) + end for end, _ in ends], [weight for _, weight in ends]
    wanted = sorted(range(len(messages)), key=lambda i: (messages[i], weights[i]))
    assert order_by_bytes(messages, weights) == wanted
    tensors = [torch.frombuffer(bytearray(m), dtype=torch.uint8) if m else torch.empty(0).byte() for m in messages]
    assert [bytes_of(t) for t in tensors] == messages and order_by_bytes(tensors, weights) == wanted


def test_the_scale_comes_first_in_the_order() -> None:
    rows = [struct.pack("<f", scale) + bytes(ROW) for scale in (2.0, 0.5, 1.0)]
    assert order_by_bytes(rows, [1.0] * 3) == sorted(range(3), key=lambda i: rows[i])
