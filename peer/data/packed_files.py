"""Text that is compressed (gzip, Zstandard), and tables with a column of texts (Parquet).

Strangers make these files. They are unpacked in pieces, as the reader asks for them, so that a small file that unpacks
to terabytes costs no more than the reading limit; and only a confined worker parses them.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from peer.data.conversations import MESSAGES, SHARED, encode_conversation, messages_of
from peer.decoding import MALFORMED
from peer.errors import ConfigError

GZIP: Final = ".gz"
ZSTD: Final = ".zst"
PARQUET: Final = ".parquet"
TEXT: Final = "text"
"""The column of a table, and the field of a line, that holds the text where the user names none."""
RATIO: Final = 8
"""Text is commonly a third to an eighth of its size when it is compressed."""
_WINDOW_BYTES_MAX: Final = 1 << 27  # of a Zstandard frame; what `zstd -d` takes without --long
_BUFFER_BYTES: Final = 1 << 20
_ROWS: Final = 64
_BATCH_BYTES: Final = 16 << 20
_DICTIONARY_ROWS: Final = 1 << 12  # every batch repeats the dictionary
_FOOTER_STRING_BYTES_MAX: Final = 16 << 20
_FOOTER_ITEMS_MAX: Final = 1 << 20
_MAGIC: Final = 0xFD2FB528  # of a Zstandard frame
_SKIPPABLE: Final = 0x184D2A50  # with any last four bits
_BLOCKS_MAX: Final = 1 << 22  # of a file, each of up to 128 KiB: no more are looked at
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_SIZE_BYTES: Final = (0, 2, 4, 8)
_RLE: Final = 1


class NoText(Exception):
    """A file is left out. Its text is the kind, for the account."""


class NoField(NoText):
    """A table has no such column of texts. `others`: those that it has."""

    def __init__(self, field: str, others: list[str]) -> None:
        super().__init__(f"{PARQUET} without a column {field}")
        self.others: Final = others


def suffixes_of(path: Path) -> tuple[str, str]:
    """Return a file's suffix and that of its compression, "" for none, both in lower case."""
    last = path.suffix.lower()
    if last in (GZIP, ZSTD):
        inner = Path(path.stem).suffix.lower()
        return ("" if inner == PARQUET else inner), last  # a table is read here and there, not from its beginning
    return last, ""


def is_packed(path: Path) -> bool:
    """Whether a library unpacks the file."""
    suffix, packing = suffixes_of(path)
    return bool(packing) or suffix == PARQUET


@contextmanager
def unpacking(file: BinaryIO, packing: str) -> Iterator[BinaryIO]:
    """Yield the content of a file with that suffix of a compression. Raises NoText in the block where it is damaged,
    ConfigError where a library is missing."""
    damaged: tuple[type[Exception], ...] = ()
    content = file
    if packing == GZIP:
        damaged = (gzip.BadGzipFile, EOFError, zlib.error)
        content = cast(BinaryIO, gzip.GzipFile(fileobj=file))
    elif packing == ZSTD:
        zstandard = _library("zstandard", ZSTD)
        damaged = (zstandard.ZstdError,)
        frames = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
        content = frames.stream_reader(file, read_size=_BUFFER_BYTES, read_across_frames=True, closefd=False)
    try:
        yield content
    except damaged as error:
        raise NoText(f"damaged {packing}") from error
    if packing == ZSTD and not file.read(1) and not is_whole(file):
        raise NoText(f"damaged {packing}")


def rows_of(file: BinaryIO, field: str, chat: bool = False) -> Iterator[bytes | None]:
    """Yield the column `field` of a Parquet file, a row at a time, None for one without. Raises NoText for a damaged
    file, NoField for one without such a column, ConfigError where pyarrow is missing. A column of bytes is text where
    they are UTF-8: writers other than Arrow often do not mark their strings. `chat`: the column holds lists of
    messages, which are yielded in their JSON form."""
    arrow, parquet = _library("pyarrow", PARQUET), _library("pyarrow.parquet", PARQUET)
    try:
        table = parquet.ParquetFile(
            file,
            buffer_size=_BUFFER_BYTES,
            thrift_string_size_limit=_FOOTER_STRING_BYTES_MAX,
            thrift_container_size_limit=_FOOTER_ITEMS_MAX,
        )
        texts = (arrow.string(), arrow.large_string(), arrow.string_view())
        unmarked = (arrow.binary(), arrow.large_binary(), arrow.binary_view())
        columns = [(each.name, each.type, _stored_type(arrow, each.type)) for each in table.schema_arrow]
        if chat:
            lists = [name for name, kind, _ in columns if arrow.types.is_list(kind) or arrow.types.is_large_list(kind)]
            field = SHARED if field == MESSAGES and field not in lists else field
            if lists.count(field) != 1:
                raise NoField(field, lists)
            rows = _rows_at_once(table.metadata)
            for batch in table.iter_batches(batch_size=rows, columns=[field], use_threads=False):
                yield from map(_conversation, batch.column(batch.schema.get_field_index(field)))
            return
        found = [(kind, stored) for name, kind, stored in columns if name == field and stored in texts + unmarked]
        if len(found) != 1:
            raise NoField(field, [name for name, _, stored in columns if stored in texts])
        ((kind, stored),) = found
        rows = (
            _DICTIONARY_ROWS
            if arrow.types.is_dictionary(getattr(kind, "storage_type", kind))
            else _rows_at_once(table.metadata)
        )
        for batch in table.iter_batches(batch_size=rows, columns=[field], use_threads=False):
            for value in batch.column(batch.schema.get_field_index(field)):  # `a.b` also picks b of a structure a
                content = _content(value)
                yield _if_text(content) if content is not None and stored in unmarked else content
    except (arrow.ArrowException, OSError) as error:
        raise NoText(f"damaged {PARQUET}") from error


def _conversation(value: Any) -> bytes | None:
    """Return the messages of a row in their JSON form; None where they are no messages."""
    try:
        return encode_conversation(messages_of(value.as_py()))
    except MALFORMED:
        return None


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows of a table are read at once: fewer of large ones."""
    size_bytes: int = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    count: int = _BATCH_BYTES * metadata.num_rows // max(1, size_bytes)
    return max(1, min(_ROWS, count))


def _stored_type(arrow: Any, kind: Any) -> Any:
    """Return the type of the values behind dictionaries and extensions."""
    while True:
        if isinstance(kind, arrow.BaseExtensionType):
            kind = kind.storage_type
        elif arrow.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def _content(value: Any) -> bytes | None:
    """Return the bytes of a value behind dictionaries and extensions, None for one that is null."""
    while value is not None and hasattr(value, "value"):
        value = value.value
    content = None if value is None else value.as_buffer()
    found: bytes | None = None if content is None else content.to_pybytes()
    return found


def _if_text(content: bytes) -> bytes | None:
    """Return bytes that are UTF-8 without a zero byte, None for others."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in content else content


def _library(name: str, suffix: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ConfigError(f"{suffix} files need {package}: pip install {package}") from None


def is_whole(file: BinaryIO) -> bool:
    """Whether a Zstandard file (RFC 8878), which is at any place, ends where a frame does: the library takes one that
    ends within a frame as a shorter text. Reads the headers of frames and blocks only."""
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
