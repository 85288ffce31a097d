"""The mean in C against the torch code, and the order of the messages."""

from __future__ import annotations

import math
import struct
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, get_codec
from optim.codecs.interface import bytes_of, order_by_bytes
from optim.merge import contribution_weights, merge_part
from peer.errors import ProtocolViolation
from tests.optim.kernels.test_codec import LENGTHS, both, message, refusing_torch, same_bits, vector
from tests.optim.kernels.torch_only import torch_only

INT8 = get_codec("int8")


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("weights", [[1.0], [0.1, 0.0, 0.2, 0.7], [1 / 48] * 48], ids=["one", "with 0", "many"])
def test_the_result_is_that_of_torch(numel: int, weights: list[float]) -> None:
    messages = [INT8.encode(vector(numel, seed)) for seed in range(len(weights))]
    with refusing_torch():
        merged = merge_part(INT8, messages, weights, numel, INT8)
    with torch_only():
        assert same_bits(merged, merge_part(INT8, messages, weights, numel, INT8))


def test_clipped_weights_and_messages_that_begin_anywhere() -> None:
    numel = 2 * ROW + 1
    weights = contribution_weights([100, 130, 90, 110], [1.0, 1.1, 2.0, 0.9])
    assert sum(weights) < 0.99, "one is clipped"
    views = [memoryview(bytes(k) + message(numel, [10.0**-k], k))[k:] for k in range(4)]
    assert same_bits(*both(lambda: merge_part(INT8, views, weights, numel, INT8)))


def test_each_operation_is_rounded_alone() -> None:
    """Against numpy, an operation at a time: a fused multiply-add would differ in about a tenth of the sums."""
    numel, weights = ROW, [0.3, 0.6, 0.1]
    messages = [message(numel, [scale], seed) for seed, scale in enumerate((1 / 3, 0.1, 7e-3))]
    total = np.zeros(numel, np.float32)
    for k, (data, weight) in enumerate(zip(messages, weights, strict=True)):
        scale = np.frombuffer(data, np.float32, 1)[0]
        term = np.frombuffer(data, np.int8, numel, 4).astype(np.float32) * scale * np.float32(weight)
        total = term if k == 0 else total + term
    wanted = INT8.encode(torch.from_numpy(total))
    assert same_bits(merge_part(INT8, messages, weights, numel, INT8), wanted)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 2.0**121])
@pytest.mark.parametrize("place", [0, 2])
def test_a_message_with_a_bad_scale_is_refused_alike(scale: float, place: int) -> None:
    numel = 2 * ROW
    messages = [message(numel, [1.0], k) for k in range(3)]
    messages[place] = message(numel, [1.0, scale])
    here, wanted = both(lambda: merge_part(INT8, messages, [1 / 3] * 3, numel, INT8))
    assert here == wanted and "scale" in here


def test_a_sum_that_is_not_finite_is_refused_alike() -> None:
    messages = [message(ROW, [2.0**120], k) for k in range(2)]
    here, wanted = both(lambda: merge_part(INT8, messages, [1e30, 1e30], ROW, INT8))
    assert here == wanted and "not finite" in here


def test_a_wrong_length_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="bytes instead of"):
        merge_part(INT8, [message(ROW, [1.0]), message(ROW - 1, [1.0])], [0.5, 0.5], ROW, INT8)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3 * ROW),
    st.lists(st.tuples(st.floats(0, 2.0**121, width=32), st.floats(0, 1)), min_size=1, max_size=6),
)
def test_any_scales_and_weights(numel: int, parts: list[tuple[float, float]]) -> None:
    messages = [message(numel, [scale], k) for k, (scale, _) in enumerate(parts)]
    here, wanted = both(lambda: merge_part(INT8, messages, [weight for _, weight in parts], numel, INT8))
    assert here == wanted if isinstance(wanted, str) else same_bits(here, wanted)


def test_other_result_codecs_are_left_to_torch() -> None:
    messages = [INT8.encode(vector(5000, k)) for k in range(3)]
    for down in (get_codec("fp32"), get_codec("int4")):
        assert same_bits(*both(partial(merge_part, INT8, messages, [0.2, 0.3, 0.5], 5000, down)))


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
