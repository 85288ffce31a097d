"""The held-out part of the text: blocks of files, by a hash of the file's path and the block's number.

Whether a block is held out depends on its file alone. So a file more in the folder moves no block of another, machines
with the same files agree, and no choice of names makes a whole large file held out. The numbers of a file's blocks step
through the hash's range by the golden ratio, which keeps the share of every large file near the wanted one.

This rule alone cannot bound the share of a folder: of few or small blocks, chance may hold out none, or too many. Where
the share would be below half of the wanted one, above double, or too small for a window, blocks are held out in the
order of their hashes up to the wanted share, and the last is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from peer.data.text_files import EMPTY_LINE, LINE_CUT_BYTES, FileText

BLOCK_BYTES: Final = LINE_CUT_BYTES
_RANGE: Final = 1 << 64
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_LARGE_BYTES: Final = 10_000_000
"""From here on the share lies between half and double the wanted one, whatever a window takes."""


@dataclass(frozen=True)
class TextBlock:
    """Bytes `start` to `stop` of a file's text."""

    file: int
    """The file's index."""
    start: int
    stop: int
    order: int
    """The hash, in [0, 2^64)."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


def split(files: list[FileText], share: float, window_bytes: int, separator: bytes = EMPTY_LINE) -> tuple[bytes, bytes]:
    """Return the training and the held-out text. `share` of all bytes, in (0, 1), is wanted for the held-out text, and
    `window_bytes` for each, where there is as much. `separator` stands between texts that do not follow each other: at
    the end of a file, and at a gap where the other part was."""
    blocks = [block for index, file in enumerate(files) for block in blocks_of(file, index)]
    total = sum(block.size_bytes for block in blocks)
    least = min(window_bytes, total // 2)
    if total >= _LARGE_BYTES:
        least = min(least, int(min(share, 1 - share) * total))
    threshold = int(share * _RANGE)
    held = sum(block.size_bytes for block in blocks if block.order < threshold)
    if max(share / 2 * total, least) <= held <= min(max(2 * share * total, least), total - least):
        train = [block for block in blocks if block.order >= threshold]
        held_out = [block for block in blocks if block.order < threshold]
    else:
        wanted = min(max(round(share * total), least), total - least)
        train, held_out = _fill(files, blocks, wanted)
    return _joined(files, train, separator), _joined(files, held_out, separator)


def blocks_of(file: FileText, index: int = 0) -> Iterator[TextBlock]:
    """Yield the blocks of a file's text, each ended after the last line end within `BLOCK_BYTES`. A line longer than a
    block is cut between two characters."""
    text = file.text
    first = int.from_bytes(hashlib.blake2b(file.key, digest_size=8).digest(), "big")
    start, number = 0, 0
    while start < len(text):
        stop = min(len(text), start + BLOCK_BYTES)
        if stop < len(text):
            stop = text.rfind(b"\n", start, stop) + 1 or _character(text, stop)
        yield TextBlock(index, start, stop, (first + number * _GOLDEN) % _RANGE)
        start, number = stop, number + 1


def _fill(files: list[FileText], blocks: list[TextBlock], wanted: int) -> tuple[list[TextBlock], list[TextBlock]]:
    """Hold out blocks in the order of their hashes until they have `wanted` bytes; of the last only its end."""
    train, held_out = list[TextBlock](), list[TextBlock]()
    for block in sorted(blocks, key=lambda block: block.order):
        if wanted >= block.size_bytes:
            held_out.append(block)
        elif wanted > 0:
            cut = _cut(files[block.file].text, block, wanted)
            train.append(TextBlock(block.file, block.start, cut, block.order))
            held_out.append(TextBlock(block.file, cut, block.stop, block.order))
        else:
            train.append(block)
        wanted -= block.size_bytes
    return train, held_out


def _cut(text: bytearray, block: TextBlock, wanted: int) -> int:
    """Return where the last `wanted` bytes of a block begin: at a line, unless that is far off."""
    at = block.stop - wanted
    before = text.rfind(b"\n", block.start, at) + 1
    after = text.find(b"\n", at, block.stop) + 1
    near = min((line for line in (before, after) if line), key=lambda line: abs(line - at), default=0)
    if block.start < near < block.stop and abs(near - at) <= wanted // 8:
        return near
    return _character(text, at)


def _character(text: bytearray, at: int) -> int:
    """Return the beginning of the character that `at` lies in. `text` is UTF-8."""
    while at and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _joined(files: list[FileText], blocks: Iterable[TextBlock], separator: bytes) -> bytes:
    """Join blocks in the order of the text. Windows cross the joints, as they cross from file to file: the separator
    marks the end of a text, and no text is lost to short rests."""
    pieces = list[bytes | memoryview]()
    file, stop = -1, 0
    for block in sorted(blocks, key=lambda block: (block.file, block.start)):
        if block.start == block.stop:
            continue
        if pieces and (block.file, block.start) != (file, stop):
            pieces.append(separator)
        pieces.append(memoryview(files[block.file].text)[block.start : block.stop])
        file, stop = block.file, block.stop
    return b"".join(pieces)
