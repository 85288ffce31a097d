"""Buckets: files of documents whose keys begin with the same bits, in no order.

A bucket grows by blocks: a head with the hash of the rest, a record for each document, and the ids of all. The process
that packs pages does not trust the one that wrote the buckets: it checks every size, hash and id.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from peer.data.building.documents import ROW_BYTES_MAX

RECORD: Final = np.dtype([("key", ">u8", 4), ("tokens", "<u4"), ("text_bytes", "<u4")])
_HEAD: Final = struct.Struct("<4sIQ32s")  # mark, documents, bytes of ids, hash
_RECORD: Final = struct.Struct("<32sII")
_HEAD_MARK: Final = b"BKT1"
MARK: Final = 1 << 31
"""The bit of an id of 4 bytes that counts in the loss."""


class BucketWriter:
    """The buckets of one build. Documents are buffered until `flush` appends a block to each bucket."""

    def __init__(self, folder: Path, count: int) -> None:
        self.sizes = [0] * count
        """Of the files, as far as they are written."""
        self._folder, self._shift = folder, 65 - count.bit_length()
        self._records: list[list[bytes]] = [[] for _ in range(count)]
        self._ids: list[list[bytes]] = [[] for _ in range(count)]
        self.buffered_bytes = 0
        """Of ids or texts, the larger ones, that are not written yet."""

    def open(self, sizes: Sequence[int]) -> bool:
        """Cut the files to these sizes; "[]" begins again. Return False, and begin again, where a file is shorter.

        Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sizes = [*sizes] or [0] * len(self.sizes)
        for number, size_bytes in enumerate(self.sizes):
            path = bucket_path(self._folder, number)
            found = path.stat().st_size if path.exists() else 0
            if found < size_bytes:
                self.open([])
                return False
            if size_bytes:
                os.truncate(path, size_bytes)
            else:
                path.unlink(missing_ok=True)
        return True

    def add(self, key: bytes, text_bytes: int, *ids: bytes) -> None:
        """Add a document with the ids of its parts, 2 or 4 bytes each."""
        number = int.from_bytes(key[:8], "big") >> self._shift
        size_bytes = sum(map(len, ids))
        self._records[number].append(key)
        self._records[number].append(struct.pack("<II", size_bytes, text_bytes))
        self._ids[number].extend(ids)
        self.buffered_bytes += max(size_bytes, text_bytes) + _RECORD.size

    def flush(self, id_bytes: int) -> None:
        """Append what is buffered; it survives this process, but no power cut. `id_bytes`: the size of an id. Raises
        OSError."""
        for number, records in enumerate(self._records):
            if not records:
                continue
            table = np.frombuffer(b"".join(records), RECORD).copy()
            table["tokens"] //= id_bytes
            body, ids = table.tobytes(), self._ids[number]
            ids_bytes = sum(map(len, ids))
            digest = blake3(body)
            for piece in ids:
                digest.update(piece)
            with bucket_path(self._folder, number).open("ab") as file:
                file.write(_HEAD.pack(_HEAD_MARK, len(table), ids_bytes, digest.digest()))
                file.write(body)
                file.writelines(ids)
            self.sizes[number] += _HEAD.size + len(body) + ids_bytes
            records.clear()
            ids.clear()
        self.buffered_bytes = 0


@dataclass(frozen=True)
class Bucket:
    """The documents of a bucket in the order of their keys."""

    firsts: npt.NDArray[np.uint64]
    """The first 8 bytes of each key, as a number."""
    tokens: npt.NDArray[np.int64]
    """The number of ids of each document."""
    text_bytes: npt.NDArray[np.int64]
    _starts: npt.NDArray[np.int64]
    _content: mmap.mmap | bytes
    _id_bytes: int

    def ids(self, first: int, last: int) -> bytes:
        """Return the ids of documents, joined."""
        view = memoryview(self._content)
        starts, sizes = self._starts[first:last].tolist(), (self.tokens[first:last] * self._id_bytes).tolist()
        return b"".join([view[start : start + size] for start, size in zip(starts, sizes, strict=True)])


def bucket_path(folder: Path, number: int) -> Path:
    """Return the file of a bucket."""
    return folder / f"bucket-{number:03}"


def read_bucket(
    folder: Path, number: int, count: int, size_bytes: int, vocab_size: int, marked: bool = False
) -> Bucket:
    """Map a bucket of `count`, which must have `size_bytes` and ids below `vocab_size`. `marked`: each id has 4 bytes
    and `MARK` where it counts in the loss. Raises ValueError for any other content, OSError."""
    id_bytes = 2 if vocab_size <= 1 << 16 and not marked else 4
    path = bucket_path(folder, number)
    content: mmap.mmap | bytes = b""
    if size_bytes:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size_bytes:
                raise ValueError(f"it has not {size_bytes} bytes")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tables, starts, at = [np.empty(0, RECORD)], [np.empty(0, np.int64)], 0
    while at < size_bytes:
        table, start = _block(content, at, vocab_size, id_bytes, MARK if marked else 0)
        sizes = table["tokens"].astype(np.int64) * id_bytes
        tables.append(table)
        starts.append(start + np.cumsum(sizes) - sizes)
        at = start + int(sizes.sum())
    records = np.concatenate(tables)
    keys = records["key"].astype(np.uint64)
    shift = 65 - count.bit_length()
    if shift < 64 and (keys[:, 0] >> np.uint64(shift) != number).any():
        raise ValueError("a key belongs to another bucket")
    order = np.lexsort(keys.T[::-1])
    return Bucket(
        firsts=keys[order, 0],
        tokens=records["tokens"][order].astype(np.int64),
        text_bytes=records["text_bytes"][order].astype(np.int64),
        _starts=np.concatenate(starts)[order],
        _content=content,
        _id_bytes=id_bytes,
    )


def _block(
    content: mmap.mmap | bytes, at: int, vocab_size: int, id_bytes: int, mark: int
) -> tuple[npt.NDArray[np.void], int]:
    """Return the records of a block, checked, and where its ids begin."""
    view = memoryview(content)
    body = at + _HEAD.size
    if body > len(view):
        raise ValueError("its last block is cut")
    head, documents, ids_bytes, digest = _HEAD.unpack(view[at:body])
    start = body + documents * RECORD.itemsize
    if head != _HEAD_MARK or start + ids_bytes > len(view):
        raise ValueError("a block has no head")
    if blake3(view[body : start + ids_bytes]).digest() != digest:
        raise ValueError("a block's hash is another")
    table = np.frombuffer(view[body:start], RECORD)
    if int(table["tokens"].sum(dtype=np.uint64)) * id_bytes != ids_bytes:
        raise ValueError("a block has another number of ids than its records say")
    if len(table) and int(table["text_bytes"].max()) > ROW_BYTES_MAX:
        raise ValueError("a document is too long")
    ids = np.frombuffer(view[start : start + ids_bytes], f"<u{id_bytes}")
    if ids.size and int((ids & ~np.uint32(mark) if mark else ids).max()) >= vocab_size:
        raise ValueError("an id is not in the vocabulary")
    return table, start
