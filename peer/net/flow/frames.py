"""Frames of a flow, cut out of one read buffer.

    frame    u8 kind | u32 head bytes | u32 payload bytes | head | payload

A message's head is msgpack, its payload raw bytes. A frame has at most `FRAME_BYTES_MAX`; a larger message is sent in
pieces of its frame, so that small ones pass it on its way. A beat has no head; its payload is the asker's clock.
"""

from __future__ import annotations

import struct
from typing import Final

from peer.errors import ProtocolViolation

MESSAGE: Final = 0
QUESTION: Final = 1
"""Asks for a sign of life; the answer has the same payload."""
ANSWER: Final = 2
PIECE: Final = 3
"""The next bytes of a large message's frame."""

PREFIX: Final = struct.Struct("!BII")
HEAD_BYTES_MAX: Final = 64 << 10
SMALL_BYTES_MAX: Final = 64 << 10
"""The payload of a frame."""
FRAME_BYTES_MAX: Final = PREFIX.size + HEAD_BYTES_MAX + SMALL_BYTES_MAX
PIECE_BYTES: Final = 64 << 10
BEAT_BYTES: Final = 8
BUFFER_BYTES: Final = 2 * FRAME_BYTES_MAX

Frame = tuple[int, memoryview, memoryview]
"""(kind, head, payload)"""


def pack(kind: int, head: bytes, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """Return the bytes of a frame."""
    return b"".join((PREFIX.pack(kind, len(head), len(payload)), head, payload))


class FrameBuffer:
    """Cuts received bytes into frames, without a copy."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0

    def room(self) -> memoryview:
        """Return where the next bytes go. Frames returned before are no longer valid then."""
        if self._start == self._end:
            self._start = self._end = 0
        elif BUFFER_BYTES - self._start < FRAME_BYTES_MAX:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end :]

    def filled(self, size_bytes: int) -> None:
        """Note that this many bytes have arrived."""
        self._end += size_bytes

    def next(self) -> Frame | None:
        """Return the next frame that is whole. It is valid until `room` is called. Raises `ProtocolViolation` for one
        that no peer may send, as soon as its first bytes arrive."""
        if self._end - self._start < PREFIX.size:
            return None
        kind, head_bytes, payload_bytes = PREFIX.unpack_from(self._view, self._start)
        _check(kind, head_bytes, payload_bytes)
        begin = self._start + PREFIX.size
        middle, end = begin + head_bytes, begin + head_bytes + payload_bytes
        if end > self._end:
            return None
        self._start = end
        return kind, self._view[begin:middle], self._view[middle:end]


def _check(kind: int, head_bytes: int, payload_bytes: int) -> None:
    if kind == MESSAGE:
        fits = 0 < head_bytes <= HEAD_BYTES_MAX and payload_bytes <= SMALL_BYTES_MAX
    elif kind == PIECE:
        fits = head_bytes == 0 and PREFIX.size <= payload_bytes <= PIECE_BYTES
    else:
        fits = kind in (QUESTION, ANSWER) and head_bytes == 0 and payload_bytes == BEAT_BYTES
    if not fits:
        raise ProtocolViolation(f"a frame of kind {kind} with {head_bytes} and {payload_bytes} bytes")


def large_sizes(first: memoryview, payload_max: int) -> tuple[int, int]:
    """Return the head's and payload's size of a large message from its first piece. Raises `ProtocolViolation`."""
    kind, head_bytes, payload_bytes = PREFIX.unpack_from(first)
    if kind != MESSAGE or not 0 < head_bytes <= HEAD_BYTES_MAX or payload_bytes > payload_max:
        raise ProtocolViolation(f"a large message of kind {kind} with {head_bytes} and {payload_bytes} bytes")
    return head_bytes, payload_bytes
