"""Masks on the wire: compact, bounded, and read as they were sent."""

from __future__ import annotations

import os
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.inference.masks import KEPT, KeptMasks, mask_bytes, mask_payload_max

SIZE = 131_072 + 3


def bits_of(ids: list[int], size: int = SIZE) -> bytes:
    bits = bytearray(mask_bytes(size))
    for id in ids:
        bits[id >> 3] |= 1 << (id & 7)
    return bytes(bits)


FULL = bits_of(list(range(SIZE)))
FEW = bits_of([1, 5, SIZE - 1])
NOISE = os.urandom(mask_bytes(SIZE) - 1) + b"\x07"


def test_the_smallest_form_is_sent_and_read() -> None:
    sent, came = KeptMasks(), KeptMasks()
    sizes = list[int]()
    for position, bits in enumerate((FULL, FEW, FULL, NOISE, FEW, NOISE)):
        payload = sent.pack(position, bits)
        assert came.unpack(memoryview(payload), SIZE) == (position, bits)
        sizes.append(len(payload))
    assert sizes[1] == 5 + 3 * 4 and sizes[0] < 200 and sizes[2] == sizes[4] == sizes[5] == 9
    assert mask_bytes(SIZE) < sizes[3] <= mask_payload_max(SIZE)


def test_only_the_last_masks_are_kept() -> None:
    sent, came = KeptMasks(), KeptMasks()
    for position in range(3 * KEPT):
        payload = sent.pack(position, bits_of([position % (KEPT + 1)]))
        assert len(payload) == 9 and payload[4] == 1, "always one that is not kept any more"
        came.unpack(payload, SIZE)
    with pytest.raises(ValueError, match="not here"):
        came.unpack(struct.pack("<IBI", 99, 2, 2 * KEPT - 1), SIZE)
    assert came.unpack(struct.pack("<IBI", 99, 2, 2 * KEPT), SIZE)[0] == 99


def _compressed(bits: bytes) -> bytes:
    return struct.pack("<IB", 7, 0) + zlib.compress(bits, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0\0\0\0",
        struct.pack("<IB", 7, 3),
        struct.pack("<IB", 7, 0),
        struct.pack("<IB", 7, 0) + b"no zlib",
        _compressed(FEW)[:-2],
        _compressed(FEW) + b"more",
        _compressed(FEW[:-1]),
        _compressed(FEW + b"\0"),
        _compressed(bytes(len(FEW))),
        _compressed(FEW[:-1] + b"\x0c"),
        struct.pack("<IB", 7, 1),
        struct.pack("<IBH", 7, 1, 1),
        struct.pack("<IBI", 7, 1, SIZE),
        struct.pack("<IBI", 7, 2, 7),
        struct.pack("<IBH", 7, 2, 7),
    ],
)
def test_what_is_no_mask_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"mask|ids|position"):
        KeptMasks().unpack(payload, SIZE)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_mask_or_refused(payload: bytes) -> None:
    try:
        _, bits = KeptMasks().unpack(payload, 300)
    except ValueError:
        return
    assert len(bits) == 38 and any(bits) and not bits[-1] >> 4


def test_a_mask_that_unpacks_to_a_gigabyte_is_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        KeptMasks().unpack(_compressed(bytes(1 << 30)), SIZE)
