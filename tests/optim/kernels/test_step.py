"""The outer step in C against the torch code, and whole rounds with and without kernels."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import ROW, Codec, get_codec
from optim.kernels import CodecKernels
from optim.strategies.dense import DenseFormat
from optim.strategies.diloco import DilocoStrategy
from optim.strategies.interface import OuterStrategy, RoundInfo
from peer.errors import ProtocolViolation
from swarm.state.outer_state import OuterState
from tests.optim.kernels.messages import LENGTHS, bad_messages, each_codec, int8_message, message, same_bits, vector
from tests.optim.kernels.torch_only import torch_only

INT8 = get_codec("int8")
ROUND = RoundInfo(1, 0, 1e-3)
RULES = (DilocoOuter(), DilocoOuter(momentum=0.0, lr=1.0), DilocoOuter(0.3, 0.85, nesterov=False))


def diloco(fragments: list[list[slice]], outer: DilocoOuter, codec: Codec = INT8) -> DilocoStrategy:
    return DilocoStrategy(DenseFormat(fragments, codec, codec), outer)


def stepped(strategy: OuterStrategy, before: list[torch.Tensor], result: bytes) -> list[torch.Tensor]:
    """Apply the encoded results of all slices to a state; what they do not change is -5."""
    after = [torch.full_like(t, -5.0) for t in before]
    coding, begin = strategy.coding(ROUND, before), 0
    for index in range(coding.count):
        end = begin + coding.result_bytes(index, 1) if index + 1 < coding.count else len(result)
        strategy.apply(ROUND, coding, index, memoryview(result)[begin:end], after, before)
        begin = end
    return after


def agree(strategy: OuterStrategy, before: list[torch.Tensor], result: bytes) -> bool:
    with patch.object(DilocoOuter, "step_into", side_effect=AssertionError("not the kernel")):
        here = stepped(strategy, before, result)
    with torch_only(), patch.object(CodecKernels, "step", side_effect=AssertionError("the kernel")):
        wanted = stepped(strategy, before, result)
    return all(map(same_bits, here, wanted))


@each_codec
@pytest.mark.parametrize("outer", RULES)
@pytest.mark.parametrize("numel", [n for n in LENGTHS if n])
def test_the_next_state_is_that_of_torch(codec: Codec, outer: DilocoOuter, numel: int) -> None:
    before = [vector(numel, 1), vector(numel, 2)]
    result = codec.encode(vector(numel, 3, codec)).numpy().tobytes()
    assert agree(diloco([[slice(0, numel)]], outer, codec), before, result)


@each_codec
@pytest.mark.parametrize("outer", RULES)
def test_places_may_begin_and_end_within_a_row(codec: Codec, outer: DilocoOuter) -> None:
    places = [
        slice(3, 10),
        slice(100, 100 + ROW + 1),
        slice(9000, 9001),
        slice(9001, 9001 + 2 * ROW),
        slice(20000, 20001),
    ]
    before = [vector(20010, 1), vector(20010, 2)]
    result = message(codec, sum(p.stop - p.start for p in places))
    assert agree(diloco([places], outer, codec), before, result)
    untouched = stepped(diloco([places], outer, codec), before, result)[0]
    assert untouched[:3].tolist() == [-5.0] * 3 and float(untouched[10]) == float(untouched[20001]) == -5.0


def test_each_operation_is_rounded_alone() -> None:
    """Against numpy, an operation at a time."""
    theta, velocity = vector(ROW, 1), vector(ROW, 2)
    data = int8_message(ROW, [1 / 3])
    lr, momentum = np.float32(0.7), np.float32(0.9)
    update = np.frombuffer(data, np.int8, ROW, 4).astype(np.float32) * np.frombuffer(data, np.float32, 1)[0]
    v = velocity.numpy() * momentum + update
    wanted = theta.numpy() - (v * momentum + update) * lr
    after = stepped(diloco([[slice(0, ROW)]], DilocoOuter()), [theta, velocity], data)
    assert same_bits(after[0], torch.from_numpy(wanted)) and same_bits(after[1], torch.from_numpy(v))


@each_codec
def test_a_bad_result_is_refused(codec: Codec) -> None:
    before = [vector(3 * ROW, 1), vector(3 * ROW, 2)]
    for result in bad_messages(codec, 3 * ROW, 2 * ROW - 1):
        with pytest.raises(ProtocolViolation, match="infinite or not a number"):
            stepped(diloco([[slice(0, 3 * ROW)]], DilocoOuter(), codec), before, result)


@each_codec
def test_a_result_of_another_length_is_refused(codec: Codec) -> None:
    before = [vector(ROW, 1), vector(ROW, 2)]
    with pytest.raises(ProtocolViolation, match="bytes instead of"):
        stepped(diloco([[slice(0, ROW)]], DilocoOuter(), codec), before, message(codec, ROW) + b"\0")


def test_weights_of_another_type_are_left_to_torch() -> None:
    before = [vector(ROW, k).double() for k in (1, 2)]
    after = stepped(diloco([[slice(0, ROW)]], DilocoOuter()), before, int8_message(ROW, [0.5]))
    with torch_only():
        assert all(
            map(same_bits, after, stepped(diloco([[slice(0, ROW)]], DilocoOuter()), before, int8_message(ROW, [0.5])))
        )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 2 * ROW)), min_size=1, max_size=4),
    st.floats(0, 2.0**120, width=32),
    st.floats(0, 2),
    st.floats(0, 0.99),
    st.booleans(),
)
def test_any_places_scale_and_factors(
    gaps: list[tuple[int, int]], scale: float, lr: float, momentum: float, nesterov: bool
) -> None:
    places, at = [], 0
    for gap, size in gaps:
        places.append(slice(at + gap, at + gap + size))
        at = places[-1].stop
    before = [vector(at, 1), vector(at, 2)]
    data = int8_message(sum(size for _, size in gaps), [scale, 1.0])
    assert agree(diloco([places], DilocoOuter(lr, momentum, nesterov)), before, data)


def rounds(count: int, codec: Codec) -> list[bytes]:
    """The state hashes of a group of three in Streaming DiLoCo with two fragments."""
    numel = 150_001
    fragments = [[slice(0, 70_000), slice(100_000, 100_003)], [slice(70_000, 100_000), slice(100_003, numel)]]
    strategy = diloco(fragments, DilocoOuter(), codec)
    state, hashes = OuterState.in_memory([vector(numel), torch.zeros(numel)], strategy), []
    for number in range(1, count + 1):
        info = RoundInfo(number, number - 1, 1e-3)
        coding = strategy.coding(info, state.tensors)
        sent, norms = [], []
        for peer in range(3):
            message = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
            product = vector(sum(p.stop - p.start for p in coding.places), 100 * number + peer, codec)
            norms.append(math.sqrt(sum(strategy.encode(info, coding, product, message))))
            sent.append(message)
        weights = strategy.weights([1, 2, 3], norms)
        merged = [k for k in range(3) if weights[k] > 0]
        state.begin(info, coding)
        for index in range(coding.count):
            result = coding.merge(index, [sent[k][index] for k in merged], [weights[k] for k in merged])
            state.build(index, memoryview(result.numpy().data))
        hashes.append(state.hash_next())
        state.commit(hashes[-1])
    return hashes


@each_codec
def test_rounds_have_the_same_state_hashes_with_and_without_kernels(codec: Codec) -> None:
    with_kernels = rounds(4, codec)
    with torch_only():
        assert rounds(4, codec) == with_kernels
    assert len(set(with_kernels)) == 4
