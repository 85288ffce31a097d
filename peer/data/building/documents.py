"""The documents of a file, one by one, and the key that gives each its place in a data set.

A document is a row or line of a file of several; a file that is one text is cut after lines into documents of a bounded
size. A key depends on a document's text and the seed alone, so the order of documents depends on no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

from peer.data.text_files import TextReader, holds_one_text

TEXT_BYTES_MAX: Final = 1 << 20
"""Of a document that is cut from a text."""
ROW_BYTES_MAX: Final = 16 << 20
"""Of a document in a JSON or .parquet file; a longer one is cut as a text is."""
VALUE_BYTES_MAX: Final = 64 << 20
"""Of a JSON value: it is held in memory whole."""
_CONTEXT: Final = "barnraise data set, order of documents, 1"


class DocumentKeys:
    """The keys of a seed."""

    def __init__(self, seed: int) -> None:
        self._key = blake3(seed.to_bytes(8, "little"), derive_key_context=_CONTEXT).digest()

    def of(self, text: bytes) -> bytes:
        """Return the key of a document, 32 bytes."""
        return blake3(text, key=self._key).digest()


def held_out_end(share: float) -> int:
    """Return the number below which a key's first 8 bytes, big-endian, hold a document out. It is exact: a product with
    a power of two rounds nothing."""
    return int(share * (1 << 64))


def documents_of(reader: TextReader, path: Path) -> Iterator[bytes]:
    """Yield the documents of a file, UTF-8, none empty. Raises as `TextReader.pieces`."""
    if reader.chat:
        yield from reader.pieces(path)
        return
    if holds_one_text(path):
        yield from _cut(reader.pieces(path), TEXT_BYTES_MAX)
        return
    for text in reader.pieces(path):
        yield from (text,) if len(text) <= ROW_BYTES_MAX else _cut((text,), ROW_BYTES_MAX)


def _cut(pieces: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Cut a text after lines, or between two characters where a line is too long, wherever the pieces end."""
    rest = bytearray()
    for piece in pieces:
        rest += piece
        start = 0
        while len(rest) - start > most_bytes:
            end = rest.rfind(b"\n", start, start + most_bytes) + 1 or _character(rest, start + most_bytes)
            yield bytes(memoryview(rest)[start:end])
            start = end
        del rest[:start]
    if rest:
        yield bytes(rest)


def _character(text: bytearray, at: int) -> int:
    """Return the beginning of the character that `at` lies in."""
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at
