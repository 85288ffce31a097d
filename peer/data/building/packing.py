"""The second pass of a build: bucket after bucket, sorted by the keys of documents, into windows, pages and files.

Windows do not overlap and pages hold whole windows, so each part is one stream of ids, cut into files. A bucket is
deleted once its ids are on disk and a note says so. Memory is that of one bucket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from blake3 import blake3

from peer.bounds import HASH_BYTES, Hash, Number
from peer.config import TOKENS_MAX
from peer.data.building.buckets import MARK, Bucket, bucket_path, read_bucket
from peer.data.building.documents import held_out_end
from peer.data.building.gathering import GatheredText
from peer.data.building.plan import BuildPlan, replace_file, write_note
from peer.data.pages.folder import INDEX, file_name, pages_a_file
from peer.data.pages.index import INDEX_BYTES_MAX, PageIndex, PagePart, encode_index
from peer.errors import CheckpointError, ConfigError
from peer.files import fsync_path

PAGES_FILE: Final = re.compile(r"(train|held-out)-\d{5}\.pages")
_COPY_BYTES: Final = 4 << 20
_PENDING_MAX: Final = 4 * (TOKENS_MAX + 1)


class PartNote(msgspec.Struct, kw_only=True):
    """A part as far as it is on disk."""

    size_bytes: Number = 0
    hashes: Annotated[bytes, msgspec.Meta(max_length=INDEX_BYTES_MAX)] = b""
    """Of whole pages."""
    rest: Hash = blake3(b"").digest()
    """Of the bytes after them."""
    documents: Number = 0
    text_bytes: Number = 0
    pending: Annotated[bytes, msgspec.Meta(max_length=_PENDING_MAX)] = b""
    """Ids with marks, 4 bytes each, that do not make a window yet."""


class PackingNote(msgspec.Struct, kw_only=True):
    """How far the second pass is."""

    plan: bytes
    gathered: GatheredText
    bucket: Number = 0
    """The next one."""
    is_cut: bool = False
    """Whether the rests shorter than a window are left out of the parts."""
    train: PartNote = msgspec.field(default_factory=PartNote)
    held_out: PartNote = msgspec.field(default_factory=PartNote)


class PartWriter:
    """The stream of ids of a part, in files of whole pages."""

    def __init__(self, folder: Path, index: PageIndex, note: PartNote, is_train: bool) -> None:
        self.note = note
        self._folder, self._is_train = folder, is_train
        self._page_bytes = index.page_windows * index.row_bytes
        self._file_bytes = pages_a_file(index) * self._page_bytes
        self._hash = blake3()
        self._written = set[int]()
        """Files that the disk may not have yet."""

    def open(self) -> None:
        """Cut the files to what the note says, and continue behind it. Raises OSError, ValueError for other content."""
        number, rest = divmod(self.note.size_bytes, self._file_bytes)
        path = self._file(number)
        if rest:
            if path.stat().st_size < rest:
                raise ValueError(f"{path.name} is shorter than it was")
            os.truncate(path, rest)
        else:
            path.unlink(missing_ok=True)
        while (path := self._file(number := number + 1)).exists():
            path.unlink()
        self._hash = blake3(self._end(self.note.size_bytes % self._page_bytes))
        if self._hash.digest() != self.note.rest:
            raise ValueError(f"{self._file(self.note.size_bytes // self._file_bytes).name} is not as it was written")

    def write(self, data: bytes) -> None:
        """Append ids. Raises OSError."""
        view = memoryview(data)
        while view:
            number, at = divmod(self.note.size_bytes, self._file_bytes)
            self._written.add(number)
            with self._file(number).open("ab", buffering=0) as file:
                while view and at < self._file_bytes:
                    piece = view[: self._page_bytes - at % self._page_bytes]
                    written = file.write(piece)
                    self._hash.update(piece[:written])
                    at += written
                    self.note.size_bytes += written
                    view = view[written:]
                    if at % self._page_bytes == 0:
                        self.note.hashes += self._hash.digest()
                        self._hash = blake3()

    def sync(self) -> None:
        """Wait until the disk has all, and note it. Raises OSError."""
        self.note.rest = self._hash.digest()
        for number in self._written:
            fsync_path(self._file(number))
        self._written.clear()
        fsync_path(self._folder)

    def cut(self, size_bytes: int) -> None:
        """Note that only so many bytes of the stream belong to the part."""
        note = self.note
        note.rest = blake3(self._end(size_bytes % self._page_bytes, size_bytes)).digest()
        note.hashes = note.hashes[: size_bytes // self._page_bytes * HASH_BYTES]
        note.size_bytes = size_bytes

    def part(self, row_bytes: int) -> PagePart:
        """Return what an index says of the part."""
        note = self.note
        rest = note.rest if note.size_bytes % self._page_bytes else b""
        return PagePart(
            windows=note.size_bytes // row_bytes,
            documents=note.documents,
            text_bytes=note.text_bytes,
            hashes=note.hashes + rest,
        )

    def _end(self, count: int, end: int | None = None) -> bytes:
        """Return the last `count` bytes before `end` (default: before the end of the stream)."""
        start = (self.note.size_bytes if end is None else end) - count
        if not count:
            return b""
        number, at = divmod(start, self._file_bytes)
        with self._file(number).open("rb") as file:
            return os.pread(file.fileno(), count, at)

    def _file(self, number: int) -> Path:
        return self._folder / file_name(number, self._is_train)


@dataclass
class Packing:
    """The second pass. `buckets` is their folder, `out` that of the data set, `note` the file of the note."""

    plan: BuildPlan
    buckets: Path
    out: Path
    note_path: Path
    note: PackingNote
    progress: Callable[[int, int], None] = lambda done, of: None
    """Takes the bytes of buckets that are done, and those of all."""
    _held_out: PartWriter = field(init=False)
    _train: PartWriter = field(init=False)

    def run(self) -> PageIndex:
        """Write the pages, and the index last. Raises ConfigError for too little text, CheckpointError for a file that
        was changed meanwhile, OSError."""
        gathered = self.note.gathered
        try:
            draft = self.plan.index(gathered.vocab_size, gathered.end_of_text)
            self._train = PartWriter(self.out, draft, self.note.train, is_train=True)
            self._held_out = PartWriter(self.out, draft, self.note.held_out, is_train=False)
            self._train.open()
            self._held_out.open()
        except (ValueError, FileNotFoundError) as error:
            raise self._changed(str(error)) from error
        sizes = gathered.sizes
        for number in range(self.note.bucket, len(sizes)):
            try:
                bucket = read_bucket(
                    self.buckets, number, len(sizes), sizes[number], gathered.vocab_size, self.plan.is_chat
                )
            except (ValueError, FileNotFoundError) as error:
                raise self._changed(f"{bucket_path(self.buckets, number).name}: {error}") from error
            self._pack(bucket, draft)
            del bucket
            self._train.sync()
            self._held_out.sync()
            self.note.bucket = number + 1
            write_note(self.note_path, self.note)
            bucket_path(self.buckets, number).unlink(missing_ok=True)
            self.progress(sum(sizes[: number + 1]), sum(sizes))
        return self._finish(draft)

    def _pack(self, bucket: Bucket, draft: PageIndex) -> None:
        """Append a bucket's documents: those held out are the first of all."""
        end = held_out_end(self.plan.validation_share)
        held = int((bucket.firsts < end).sum()) if end < 1 << 64 else len(bucket.firsts)
        missing = draft.seq_len + 1 - _tokens(draft, self.note.held_out) - int(bucket.tokens[:held].sum())
        while missing > 0 and held < len(bucket.firsts):
            missing -= int(bucket.tokens[held])
            held += 1
        self._append(self._held_out, bucket, 0, held, draft)
        self._append(self._train, bucket, held, len(bucket.firsts), draft)

    @staticmethod
    def _append(writer: PartWriter, bucket: Bucket, first: int, last: int, draft: PageIndex) -> None:
        writer.note.documents += last - first
        writer.note.text_bytes += int(bucket.text_bytes[first:last].sum())
        tokens = bucket.tokens.tolist()
        while first < last:
            stop, count = first, 0
            while stop < last and count < _COPY_BYTES:
                count += tokens[stop]
                stop += 1
            ids = bucket.ids(first, stop)
            writer.write(_rows(draft, writer.note, ids) if draft.masked else ids)
            first = stop

    def _finish(self, draft: PageIndex) -> PageIndex:
        if not self.note.is_cut:
            for name, writer in (("to train on", self._train), ("held out", self._held_out)):
                size_bytes = writer.note.size_bytes
                if size_bytes < draft.row_bytes:
                    tokens = _tokens(draft, writer.note)
                    raise ConfigError(
                        f"there are {tokens} tokens {name}, and a window takes {self.plan.seq_len + 1}: add text, lower"
                        " --seq-len, or change --held-out"
                    )
                writer.cut(size_bytes - size_bytes % draft.row_bytes)
            self.note.is_cut = True
            write_note(self.note_path, self.note)
            self._train.open()
            self._held_out.open()
        index = msgspec.structs.replace(
            draft, train=self._train.part(draft.row_bytes), held_out=self._held_out.part(draft.row_bytes)
        )
        replace_file(self.out / INDEX, encode_index(index))
        fsync_path(self.out)
        return index

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the unfinished build in {self.out} was changed ({what}): delete that folder, and build again"
        )


def _tokens(draft: PageIndex, note: PartNote) -> int:
    """Return the tokens of a part so far."""
    if draft.masked:
        return note.size_bytes // draft.row_bytes * (draft.seq_len + 1) + len(note.pending) // 4
    return note.size_bytes // np.dtype(draft.dtype).itemsize


def _rows(draft: PageIndex, note: PartNote, ids: bytes) -> bytes:
    """Return the whole windows that these ids with marks make after those that are pending; the rest is then."""
    tokens = np.frombuffer(note.pending + ids, "<u4")
    rows = len(tokens) // (draft.seq_len + 1)
    whole = rows * (draft.seq_len + 1)
    note.pending = tokens[whole:].tobytes()
    if not rows:
        return b""
    table = tokens[:whole].reshape(rows, draft.seq_len + 1)
    plain = (table & ~np.uint32(MARK)).astype(np.dtype(draft.dtype).newbyteorder("<"))
    bits = np.packbits(table >= MARK, axis=1, bitorder="little")
    return bytes(np.concatenate([plain.view(np.uint8).reshape(rows, -1), bits], axis=1))
