"""Whether a Zstandard file is whole (RFC 8878). The library takes a file that ends within a frame as a shorter text."""

from __future__ import annotations

import io
import os
from typing import BinaryIO, Final, cast

_MAGIC: Final = 0xFD2FB528
_SKIPPABLE: Final = 0x184D2A50  # with any last four bits
_BLOCKS_MAX: Final = 1 << 22  # of a file, each of up to 128 KiB: no more are looked at
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_SIZE_BYTES: Final = (0, 2, 4, 8)
_RLE: Final = 1


def is_whole(file: BinaryIO) -> bool:
    """Whether `file`, which is at any place, ends where a frame does. Reads the headers of frames and blocks only."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    headers, blocks = io.BufferedReader(cast(io.RawIOBase, file)), 0
    try:
        while headers.tell() < end and blocks <= _BLOCKS_MAX:
            blocks += _skip_frame(headers, end)
        return headers.tell() == end and blocks <= _BLOCKS_MAX
    except EOFError:
        return False
    finally:
        headers.detach()  # `file` stays open


def _skip_frame(file: BinaryIO, end: int) -> int:
    """Pass over a frame and return the number of its blocks. Raises EOFError if the file ends before, or is none."""
    magic = _number(file, 4)
    if magic & ~0xF == _SKIPPABLE:
        file.seek(_number(file, 4), os.SEEK_CUR)
        return 0
    if magic != _MAGIC:
        raise EOFError
    has_checksum = _skip_header(file)
    for count in range(1, _BLOCKS_MAX + 1):
        header = _number(file, 3)
        is_last, kind, size_bytes = bool(header & 1), header >> 1 & 3, header >> 3
        file.seek(1 if kind == _RLE else size_bytes, os.SEEK_CUR)
        if is_last:
            file.seek(4 if has_checksum else 0, os.SEEK_CUR)
            return count
        if file.tell() >= end:
            break
    raise EOFError


def _skip_header(file: BinaryIO) -> bool:
    """Pass over the rest of a frame's header. Return whether a checksum follows the frame."""
    flags = _number(file, 1)
    is_single = bool(flags & 0x20)
    size_bytes = _SIZE_BYTES[flags >> 6] or int(is_single)
    file.seek(int(not is_single) + _DICTIONARY_BYTES[flags & 3] + size_bytes, os.SEEK_CUR)
    return bool(flags & 4)


def _number(file: BinaryIO, size_bytes: int) -> int:
    found = file.read(size_bytes)
    if len(found) < size_bytes:
        raise EOFError
    return int.from_bytes(found, "little")
