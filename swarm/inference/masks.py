"""Masks on the wire: which tokens may be drawn at a position, as the payload of an `Allow`.

    u32 position, little endian | u8 kind | content

    kind 0    the bits, one a token, the least significant one of a byte first, compressed with zlib
    kind 1    the ids of the allowed tokens, u32 each, little endian, ascending
    kind 2    u32: the position whose mask was the same, one of the last `KEPT` of this revision of the session

The smallest is sent. Inside of a JSON string most masks are the same one, which takes 9 bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from typing import Any, Final

import numpy as np

KEPT: Final = 16
_HEAD: Final = struct.Struct("<IB")
_POSITION: Final = struct.Struct("<I")
_BITS, _IDS, _SAME = range(3)
_LEVEL: Final = 1


def mask_bytes(vocab_size: int) -> int:
    """Return the size of a mask's bits."""
    return (vocab_size + 7) // 8


def mask_payload_max(vocab_size: int) -> int:
    """Return the most bytes that a mask takes on the wire: zlib adds little to what it cannot compress."""
    size = mask_bytes(vocab_size)
    return _HEAD.size + size + size // 1000 + 64


class KeptMasks:
    """The last masks of one revision of a session, by position: at the client those that it sent, at the last server
    those that came."""

    def __init__(self) -> None:
        self._masks: OrderedDict[int, bytes] = OrderedDict()

    def pack(self, position: int, bits: bytes) -> bytes:
        """Return the payload of the mask of a position, and keep the mask."""
        same = next((at for at, kept in self._masks.items() if kept == bits), None)
        if same is not None:
            kind, content = _SAME, _POSITION.pack(same)
        else:
            kind, content = _BITS, zlib.compress(bits, _LEVEL)
            if 4 * int.from_bytes(bits, "little").bit_count() < len(content):
                kind, content = _IDS, _ids_of(bits).tobytes()
        self._keep(position, bits)
        return _HEAD.pack(position, kind) + content

    def unpack(self, payload: bytes | memoryview, vocab_size: int) -> tuple[int, bytes]:
        """Return a position and the bits of its mask, and keep the mask. Raises ValueError for what is no mask of this
        vocabulary, or allows no token."""
        if len(payload) < _HEAD.size:
            raise ValueError(f"a mask in {len(payload)} bytes")
        position, kind = _HEAD.unpack_from(payload)
        content, size = bytes(payload[_HEAD.size :]), mask_bytes(vocab_size)
        if kind == _BITS:
            bits = _inflated(content, size)
        elif kind == _IDS:
            bits = _of_ids(content, vocab_size)
        elif kind == _SAME:
            bits = self._same(content)
        else:
            raise ValueError(f"a mask of the kind {kind}")
        if len(bits) != size or (vocab_size & 7 and bits[-1] >> (vocab_size & 7)):
            raise ValueError(f"a mask that is none of {vocab_size} tokens")
        if bits == bytes(size):
            raise ValueError("a mask that allows no token")
        self._keep(position, bits)
        return position, bits

    def _same(self, content: bytes) -> bytes:
        if len(content) != _POSITION.size:
            raise ValueError(f"a position in {len(content)} bytes")
        (at,) = _POSITION.unpack(content)
        if at not in self._masks:
            raise ValueError(f"the mask of position {at} is not here")
        return self._masks[at]

    def _keep(self, position: int, bits: bytes) -> None:
        self._masks[position] = bits
        self._masks.move_to_end(position)
        if len(self._masks) > KEPT:
            self._masks.popitem(last=False)


def _ids_of(bits: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return the ids of the allowed tokens, of which there are few."""
    whole = np.frombuffer(bits, np.uint8)
    (at,) = np.nonzero(whole)
    rows, places = np.nonzero(np.unpackbits(whole[at, None], axis=1, bitorder="little"))
    return (8 * at[rows] + places).astype("<u4")


def _inflated(content: bytes, size: int) -> bytes:
    """Decompress to `size` bytes, and no more. Raises ValueError."""
    inflater = zlib.decompressobj()
    try:
        bits = inflater.decompress(content, size + 1)
    except zlib.error as error:
        raise ValueError("a mask that zlib does not read") from error
    if not inflater.eof or inflater.unused_data:
        raise ValueError(f"a compressed mask that is not one of {size} bytes")
    return bits


def _of_ids(content: bytes, vocab_size: int) -> bytes:
    """Return the bits of a list of ids. Raises ValueError."""
    if len(content) % 4:
        raise ValueError(f"token ids in {len(content)} bytes")
    ids = np.frombuffer(content, "<u4")
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError("a mask with a token outside the vocabulary")
    flags = np.zeros(vocab_size, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").tobytes()
