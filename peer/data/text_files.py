"""The text of a folder's files, or of one file: in which order they are read, and how their bytes become UTF-8.

A user's folder holds anything: pipes, pictures, names and text in other encodings. Files that are not readable text are
counted by kind, and never an error. A file that has two names is read once: held-out text would else be trained on.
"""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from peer.data.folder_files import NO_SUFFIX, TextSource, find_files
from peer.data.json_documents import JSON_SUFFIXES, JsonDocuments
from peer.data.packed_files import PARQUET, TEXT, NoField, NoText, rows_of, suffixes_of, unpacking

TEXT_SUFFIXES: Final = JSON_SUFFIXES | frozenset(
    {".txt", ".md", ".rst", ".py", ".csv", ".html", ".xml", ".tex", ".c", ".h", ".rs", PARQUET}
)
"""Of files that hold text, in lower case."""
LINE_CUT_BYTES: Final = 1 << 16  # a line longer than this is cut anywhere
_CHUNK_BYTES: Final = 1 << 20
_KINDS_MAX: Final = 6
_FIELDS_MAX: Final = 1000
_MARKS: Final = (  # longer marks first: that of UTF-32 LE begins with that of UTF-16 LE
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_MARK_BYTES_MAX: Final = 4
EMPTY_LINE: Final = b"\n\n"
"""Stands between two texts where a run names no token for it."""


@dataclass(frozen=True)
class FileText:
    """The text of a file, UTF-8."""

    key: bytes
    text: bytearray
    documents: int = 1


_PAST_LIMIT: Final = "past the limit"
_IN_FILES: Final = ("lines of ", "entries of ")
"""Kinds that begin so are of parts of files."""
_ONE: Final = {"lines of ": "line of ", "entries of ": "entry of "}
_SEVERAL: Final = {"unreadable folder": "unreadable folders", "link to a folder": "links to folders"}


@dataclass
class Texts:
    """All text that was read, in the order of paths, and what was not, by kind."""

    files: list[FileText] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    truncated: bool = False
    replaced: int = 0
    """Files with invalid characters, which are U+FFFD in their text."""
    has_field: bool = False
    """Whether a JSON or .parquet file has the field of texts."""
    lacks_field: bool = False
    """Whether such a file has it not."""
    other_fields: set[str] = field(default_factory=set)
    """Fields that hold text in such files as have it not."""

    @property
    def has_other_suffixes(self) -> bool:
        """Whether a file has a suffix that is not read."""
        return any(kind == NO_SUFFIX or (kind.startswith(".") and " " not in kind) for kind in self.skipped)

    def skipped_text(self) -> str:
        """Return the kinds with their counts, most frequent first, and those of parts of files after those of files;
        "nothing" without any."""
        parts = Counter({kind: count for kind, count in self.skipped.items() if kind.startswith(_IN_FILES)})
        files = Counter({kind: count for kind, count in self.skipped.items() if kind not in parts})
        return ", ".join([*_counted(files, "others"), *_counted(parts, "other lines")]) or "nothing"


def _counted(skipped: Counter[str], others: str) -> list[str]:
    kinds = [_plural(kind, count) for kind, count in skipped.most_common(_KINDS_MAX)]
    rest = skipped.total() - sum(count for _, count in skipped.most_common(_KINDS_MAX))
    return [*kinds, f"{rest} {others}"] if rest else kinds


def _plural(kind: str, count: int) -> str:
    if count != 1:
        return f"{count} {_SEVERAL.get(kind, kind)}"
    for several, one in _ONE.items():
        kind = kind.replace(several, one, 1) if kind.startswith(several) else kind
    return f"{count} {kind}"


def read_texts(source: TextSource, max_bytes: int, separator: bytes = EMPTY_LINE) -> Texts:
    """Read the text files in the order of their paths, until `max_bytes` bytes of files, unpacked, are read. The file
    that the limit falls into is cut after a line. `separator` stands between the texts of a JSON or .parquet file.
    Raises ConfigError where a library for them is missing."""
    texts = Texts()
    room = max_bytes
    seen = set[tuple[int, int]]()
    for file in sorted(find_files(source, texts.skipped), key=lambda file: file.key):
        if file.identity in seen:
            texts.skipped["under a second name"] += 1
            continue
        seen.add(file.identity)
        if not room:
            texts.skipped[_PAST_LIMIT] += 1
            texts.truncated = True
            continue
        reader = TextReader(room, separator, source.field)
        try:
            reader.read(file.path)
        except OSError:
            texts.skipped["unreadable"] += 1
            continue
        except NoText as reason:
            texts.skipped[str(reason)] += 1
            continue
        finally:
            texts.lacks_field |= reader.lacks_field
            texts.has_field |= reader.has_field
            if not reader.has_field and len(texts.other_fields) < _FIELDS_MAX:
                texts.other_fields.update(reader.other_fields)
            texts.skipped.update(reader.lost)
            texts.truncated |= reader.is_cut
            room = 0 if reader.is_cut else room
        room -= min(room, reader.read_bytes)
        texts.replaced += reader.is_replaced
        texts.files.append(FileText(file.key, reader.text, reader.documents or 1))
    return texts


class TextReader:
    """The text of one file, read in pieces of a bounded size up to `room` bytes."""

    def __init__(
        self,
        room: int = sys.maxsize,
        separator: bytes = EMPTY_LINE,
        field: str = TEXT,
        value_bytes_max: int = sys.maxsize,
        chat: bool = False,
    ) -> None:
        """`value_bytes_max`: of a JSON value. `chat`: the field holds messages; documents are their JSON forms."""
        self.text = bytearray()
        self.read_bytes = 0
        self.is_cut = False
        """Whether the file is longer than `room`."""
        self.is_replaced = False
        """Whether an invalid character became U+FFFD."""
        self.lost = Counter[str]()
        """Lines, rows and entries without a text, by kind."""
        self.documents = 0
        """Texts of a JSON or .parquet file."""
        self.has_field = False
        self.lacks_field = False
        self.other_fields: list[str] = []
        """Fields with text that a file without the field has."""
        self._room = room
        self._separator = separator
        self._field = field
        self._value_bytes_max = value_bytes_max
        self.chat = chat
        self._empty = "empty"
        self._file: BinaryIO | None = None

    @property
    def position(self) -> int:
        """The bytes of the open file, as it lies on the disk, that are behind."""
        return 0 if self._file is None or self._file.closed else self._file.tell()

    def read(self, path: Path) -> None:
        """Read the file once, into `text`. Raises OSError, and NoText for what is no text."""
        is_one = holds_one_text(path)
        for piece in self.pieces(path):
            if is_one:
                self.text += piece
            else:
                self._take_document(piece)
        if is_one and self.is_cut:
            end = self.text.rfind(b"\n", max(0, len(self.text) - LINE_CUT_BYTES)) + 1
            if end:
                del self.text[end:]
        if not self.text:
            raise self.refusal()

    def pieces(self, path: Path) -> Iterator[bytes]:
        """Yield the documents of a JSON or .parquet file, or pieces of the one text of another file, UTF-8. Raises
        OSError, and NoText for what is no text, also after some pieces."""
        suffix, packing = suffixes_of(path)
        with _open_regular(path) as self._file, unpacking(self._file, packing) as content:
            if suffix == PARQUET:
                yield from self._table(content)
            elif suffix in JSON_SUFFIXES:
                yield from self._json(content, suffix)
            elif self.chat:
                raise NoText(f"{suffix} of text, without messages")
            else:
                yield from self._decoded(content)

    def refusal(self) -> NoText:
        """Return why a file that was read is left out, if it had no text."""
        return NoText(_PAST_LIMIT if self.is_cut else self._empty)

    def _json(self, file: BinaryIO, suffix: str) -> Iterator[bytes]:
        """Yield the documents of a file. One that the limit cuts is left out."""
        documents = JsonDocuments(self._field, self._value_bytes_max, self.chat)
        try:
            yield from documents.texts(self._decoded(file), lambda: self.is_cut)
        finally:
            self.has_field, self.other_fields = documents.has_field, documents.other_fields
            self.is_replaced |= documents.is_replaced
            self.lost.update(documents.lost(suffix))
        self.lacks_field = documents.lacks_field
        self._empty = documents.refusal(suffix)

    def _table(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield a document for each row. The one that the limit cuts is left out."""
        try:
            for row in rows_of(file, self._field, self.chat):
                self.has_field = True
                if row is None:
                    self.lost[f"lines of {PARQUET} without a text"] += 1
                    continue
                size_bytes = len(row) + len(self._separator)
                self.is_cut = self.read_bytes + size_bytes > self._room
                if self.is_cut:
                    self.read_bytes = self._room
                    break
                self.read_bytes += size_bytes
                if not row:
                    self.lost[f"lines of {PARQUET} with an empty text"] += 1
                    continue
                text = row.decode(errors="replace").encode()
                self.is_replaced |= text != row
                yield text
        except NoField as error:
            self.lacks_field, self.other_fields = True, error.others
            raise
        self.has_field = True

    def _take_document(self, text: bytes) -> None:
        if self.text:
            self.text += self._separator
        self.text += text
        self.documents += 1

    def _decoded(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the file's text as UTF-8, in whole characters, up to `room` bytes of the file."""
        head = file.read(min(_MARK_BYTES_MAX, self._room))
        self.read_bytes = len(head)
        mark, encoding = next(((mark, name) for mark, name in _MARKS if head.startswith(mark)), (b"", "utf-8"))
        decoder = codecs.getincrementaldecoder(encoding)()
        chunk = head[len(mark) :]
        while True:
            if encoding == "utf-8" and b"\0" in chunk:
                raise NoText("binary")
            yield self._characters(decoder, chunk)
            chunk = file.read(min(_CHUNK_BYTES, self._room - self.read_bytes))
            if not chunk:
                break
            self.read_bytes += len(chunk)
        self.is_cut = self.read_bytes == self._room and bool(file.read(1))
        if not self.is_cut:
            yield self._characters(decoder, b"", final=True)

    def _characters(self, decoder: codecs.IncrementalDecoder, chunk: bytes, *, final: bool = False) -> bytes:
        """Return the whole characters that end in a chunk. From the first invalid one on, they become U+FFFD."""
        try:
            return decoder.decode(chunk, final).encode()
        except UnicodeDecodeError:  # the chunk has not changed the decoder
            self.is_replaced = True
            decoder.errors = "replace"
            return decoder.decode(chunk, final).encode()


def holds_one_text(path: Path) -> bool:
    """Whether a file is one text, and no JSON or .parquet file of several."""
    suffix, _ = suffixes_of(path)
    return suffix != PARQUET and suffix not in JSON_SUFFIXES


def _open_regular(path: Path) -> BinaryIO:
    """Open a file that may have become a pipe since it was found, without waiting for a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NoText("not regular")
    return open(fd, "rb", buffering=0)
