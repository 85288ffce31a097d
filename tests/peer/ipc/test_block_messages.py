"""Records between the network process and a worker that serves blocks: what is malformed is found out."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.config import ModelConfig
from peer.ipc.block_messages import (
    WIRE_TYPES,
    CloseSession,
    ComputeTokens,
    FromBlocks,
    LoadBlocks,
    MaskedToken,
    OpenSession,
    RewindSession,
    RingEnds,
    ScoredPrompt,
    SessionOpened,
    SetMask,
    SpanOutput,
    StepRefusal,
    WorkerLoad,
    pack,
    ring_bytes,
    row_bytes,
    unpack_from_worker,
    unpack_to_worker,
)
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span

MODEL = ModelConfig(vocab_size=50, hidden_size=4, layers=3, heads=2, kv_heads=1, intermediate_size=8, max_seq_len=64)
RING = RingEnds((3, 4, 5), 4096)
OUTPUT = SpanOutput(7, 3, 2, None, 0.0, (), (8, 9))
HIDDEN = bytes(2 * 4 * 4)


def load_of(first: int, end: int) -> LoadBlocks:
    return LoadBlocks(
        model=MODEL,
        span=Span(first, end, 3),
        dtype="fp32",
        window=None,
        folders=("/weights",),
        directory="/private",
        device="cpu",
        pages=8,
        rows_max=4,
        chunk_tokens=16,
        to_worker=RING,
        from_worker=RING,
    )


MIDDLE, LAST = load_of(1, 2), load_of(1, 3)


def record_of(message: Any, payload: bytes = b"") -> memoryview:
    return memoryview(pack(message) + payload)


def changed(**fields: Any) -> SpanOutput:
    return msgspec.structs.replace(OUTPUT, **fields)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (OpenSession(1, Sampling(0.5, seed=3), (b"a", b"b"), 1, 2, "int8"), b""),
        (ComputeTokens(1, 5, 2, (8, 9), True), HIDDEN),
        (RewindSession(1, 5), b""),
        (CloseSession(1), b""),
        (SetMask(1, 5), b"\x05"),
    ],
)
def test_what_goes_to_the_worker_comes_there(message: Any, payload: bytes) -> None:
    found, rest = unpack_to_worker(record_of(message, payload))
    assert found == message and bytes(rest) == payload


@pytest.mark.parametrize(
    ("message", "payload", "load"),
    [
        (SessionOpened(1, 16), b"", MIDDLE),
        (OUTPUT, HIDDEN, MIDDLE),
        (OUTPUT, HIDDEN, LAST),  # a session that ends before the last block
        (changed(wire="int8"), bytes(2 * (4 + 4)), MIDDLE),
        (changed(wire="bf16"), bytes(2 * 2 * 4), MIDDLE),
        (changed(token=3, logprob=-2.5, likeliest=((3, -2.5), (4, -3.0))), b"", LAST),
        (MaskedToken(1, 5, 49, -0.5, ((49, -0.5), (4, -3.0))), b"", LAST),
        (ScoredPrompt(1, 60, ((-0.5, ((49, -0.5), (4, -3.0))),) * 4), b"", LAST),
        (StepRefusal(1, "gap", "position 5 does not follow 3", 3), b"", LAST),
        (WorkerLoad(8, 1, 30, 2.5, 1.0), b"", LAST),
    ],
)
def test_what_comes_from_the_worker_is_read(message: FromBlocks, payload: bytes, load: LoadBlocks) -> None:
    assert unpack_from_worker(record_of(message, payload), load) == (message, payload)


@pytest.mark.parametrize(
    ("message", "payload", "load"),
    [
        (ScoredPrompt(1, 5, ((-0.5, ()),)), b"", MIDDLE),
        (ScoredPrompt(1, 5, ((-0.5, ()),)), b"1", LAST),
        (ScoredPrompt(1, 60, ((-0.5, ()),) * 5), b"", LAST),
        (ScoredPrompt(1, 0, ((-0.5, ()),) * 65), b"", LAST),
        (ScoredPrompt(1, 5, ()), b"", LAST),
        (ScoredPrompt(1, 5, ((-0.5, ((50, -0.5),)),)), b"", LAST),
        (ScoredPrompt(1, 5, ((-0.5, ((4, float("nan")),)),)), b"", LAST),
        (ScoredPrompt(1, 5, ((float("-inf"), ()),)), b"", LAST),
        (MaskedToken(1, 5, 49, -0.5, ()), b"", MIDDLE),
        (MaskedToken(1, 5, 49, -0.5, ()), b"1", LAST),
        (MaskedToken(1, 65, 49, -0.5, ()), b"", LAST),
        (MaskedToken(1, 5, 50, -0.5, ()), b"", LAST),
        (MaskedToken(1, 5, 49, -0.5, ((50, 0.0),)), b"", LAST),
        (changed(count=3), HIDDEN, MIDDLE),
        (changed(count=0, ids=()), b"", LAST),
        (changed(count=17, ids=(8,) * 17), bytes(17 * 16), MIDDLE),
        (changed(position=63), HIDDEN, MIDDLE),
        (changed(position=-1), HIDDEN, MIDDLE),
        (changed(ids=(8, 50)), HIDDEN, MIDDLE),
        (changed(token=50), b"", LAST),
        (changed(token=3, likeliest=((50, -1.0),)), b"", LAST),
        (changed(token=3, likeliest=((1, -1.0),) * 21), b"", LAST),
        (changed(token=3, logprob=float("nan")), b"", LAST),
        (changed(token=3, logprob=float("-inf")), b"", LAST),
        (changed(token=3), HIDDEN, MIDDLE),
        (changed(token=3), HIDDEN, LAST),
        (OUTPUT, b"", MIDDLE),
        (OUTPUT, HIDDEN[:-1], LAST),
        (changed(wire="int8"), HIDDEN, MIDDLE),
        (changed(wire="int4"), HIDDEN, MIDDLE),
        (OUTPUT, HIDDEN + HIDDEN, MIDDLE),
        (SessionOpened(-1, 0), b"", LAST),
        (SessionOpened(1, 1 << 40), b"", LAST),
        (SessionOpened(1, 0), b"more", LAST),
        (StepRefusal(1, "tired", "", 0), b"", LAST),  # type: ignore[arg-type]
        (StepRefusal(1, "gap", "x" * 301, 0), b"", LAST),
        (WorkerLoad(1, 1, 1, float("inf"), 1.0), b"", LAST),
        (WorkerLoad(1 << 60, 1, 1, 1.0, 1.0), b"", LAST),
        (CloseSession(1), b"", LAST),
    ],
)
def test_what_a_worker_cannot_mean_is_malformed(message: Any, payload: bytes, load: LoadBlocks) -> None:
    with pytest.raises(ValueError):
        unpack_from_worker(record_of(message, payload), load)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\x01\x00\x00",
        struct.pack("<I", 5) + b"1234",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    ],
)
def test_what_is_no_record_is_malformed(record: bytes) -> None:
    with pytest.raises(ValueError):
        unpack_from_worker(memoryview(record), LAST)


@given(st.integers(0, 60), st.binary(min_size=1, max_size=4), st.binary(max_size=40))
def test_changed_bytes_raise_one_error_or_none(at: int, bytes_: bytes, more: bytes) -> None:
    record = bytearray(record_of(changed(token=3, logprob=-2.5, likeliest=((3, -2.5),))))
    record[at : at + len(bytes_)] = bytes_
    try:
        message, payload = unpack_from_worker(memoryview(bytes(record) + more), LAST)
    except ValueError as error:
        assert len(str(error)) < 400
    else:
        assert not isinstance(message, SpanOutput) or len(payload) in (0, message.count * 16)


def test_a_ring_takes_chunks_of_any_model() -> None:
    """A record takes at most half of a ring: two chunks of hidden states with their ids."""
    for width, chunk in ((4, 1 << 16), (4096, 256), (16384, 1024)):
        size = ring_bytes(msgspec.structs.replace(MODEL, hidden_size=width), chunk)
        head = pack(ComputeTokens(1 << 53, 1 << 24, 2 * chunk, ((1 << 24) - 1,) * 2 * chunk, True))
        for wire in WIRE_TYPES:
            assert len(head) + 2 * chunk * row_bytes(width, wire) + 16 <= size // 2
    assert ring_bytes(MODEL, 16) == 1 << 20
