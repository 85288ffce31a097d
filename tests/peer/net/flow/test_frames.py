"""Frames, whatever pieces the connection cuts them into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolViolation
from peer.net.flow import frames
from peer.net.flow.frames import FrameBuffer

MESSAGES = st.tuples(st.just(frames.MESSAGE), st.binary(min_size=1, max_size=300), st.binary(max_size=3000))
PIECES = st.tuples(st.just(frames.PIECE), st.just(b""), st.binary(min_size=frames.PREFIX.size, max_size=3000))
BEATS = st.tuples(st.sampled_from([frames.QUESTION, frames.ANSWER]), st.just(b""), st.binary(min_size=8, max_size=8))


def cut(buffer: FrameBuffer, data: bytes, sizes: list[int]) -> list[tuple[int, bytes, bytes]]:
    """Put the bytes into the buffer, in stretches of these sizes in turn, and return the frames."""
    found, turn = [], 0
    while data:
        room = buffer.room()
        step = min(len(room), len(data), sizes[turn % len(sizes)])
        turn += 1
        room[:step] = data[:step]
        data = data[step:]
        buffer.filled(step)
        while (frame := buffer.next()) is not None:
            found.append((frame[0], bytes(frame[1]), bytes(frame[2])))
    return found


@given(sent=st.lists(MESSAGES | PIECES | BEATS, max_size=30), sizes=st.lists(st.integers(1, 5000), min_size=1))
def test_frames_come_as_they_were_sent(sent: list[tuple[int, bytes, bytes]], sizes: list[int]) -> None:
    data = b"".join(frames.pack(*frame) for frame in sent)
    assert cut(FrameBuffer(), data, sizes) == sent


def test_the_largest_frames_fit_into_the_buffer_wherever_they_begin() -> None:
    largest = (frames.MESSAGE, bytes(frames.HEAD_BYTES_MAX), bytes(frames.SMALL_BYTES_MAX))
    sent = [(frames.MESSAGE, b"x", b""), largest, (frames.MESSAGE, b"y", b"z" * 777), largest, largest]
    assert cut(FrameBuffer(), b"".join(frames.pack(*frame) for frame in sent), [1 << 20]) == sent


@pytest.mark.parametrize(
    ("kind", "head", "payload"),
    [
        (frames.MESSAGE, frames.HEAD_BYTES_MAX + 1, 0),
        (frames.MESSAGE, 1, frames.SMALL_BYTES_MAX + 1),
        (frames.MESSAGE, 0, 10),
        (frames.PIECE, 1, 100),
        (frames.PIECE, 0, frames.PREFIX.size - 1),
        (frames.PIECE, 0, frames.PIECE_BYTES + 1),
        (frames.QUESTION, 0, 7),
        (frames.ANSWER, 3, 8),
        (9, 1, 1),
    ],
)
def test_a_frame_that_no_peer_may_send_is_refused_by_its_prefix(kind: int, head: int, payload: int) -> None:
    buffer = FrameBuffer()
    with pytest.raises(ProtocolViolation, match=f"kind {kind}"):
        cut(buffer, frames.PREFIX.pack(kind, head, payload), [100])


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), min_size=1))
def test_any_bytes_are_frames_or_a_violation(data: bytes, sizes: list[int]) -> None:
    try:
        found = cut(FrameBuffer(), data, sizes)
    except ProtocolViolation:
        return
    assert data.startswith(b"".join(frames.pack(*frame) for frame in found))
