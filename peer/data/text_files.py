"""The text files of a folder, or one file: which are read, in which order, and how their bytes become UTF-8.

A folder of a user's holds anything: pipes, pictures, names and text in other encodings. What cannot be read as text is
counted by kind, and never an error.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from peer.data.packed_files import PARQUET, TEXT, NoField, NoText, rows_of, suffixes_of, unpacking
from peer.decoding import MALFORMED

LINE_CUT_BYTES: Final = 1 << 16  # a line longer than this is cut anywhere
_CHUNK_BYTES: Final = 1 << 20
_SUFFIX_CHARS_MAX: Final = 12
_KINDS_MAX: Final = 5
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
class TextSource:
    """A folder of text, or a file."""

    root: Path
    suffixes: frozenset[str]
    """Of files that are read, in lower case."""
    passed_over: frozenset[str]
    """Names of subfolders that are not looked into."""
    is_users: bool
    """Whether the user named it, and wants to know which suffixes are not read."""
    field: str = TEXT
    """What holds the text in a .jsonl or .parquet file."""


@dataclass(frozen=True)
class FoundFile:
    """A regular file with a suffix of text."""

    key: bytes
    """Its path relative to the folder, in the file system's bytes: names need not be UTF-8."""
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class FileText:
    """The text of a file, UTF-8."""

    key: bytes
    text: bytearray
    documents: int = 1


@dataclass
class Texts:
    """All text that was read, in the order of paths, and what was not, by kind."""

    files: list[FileText] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    truncated: bool = False
    has_field: bool = False
    """Whether a .jsonl or .parquet file has the field of texts."""
    other_fields: set[str] = field(default_factory=set)
    """Fields that hold text in such files as have it not."""

    def skipped_text(self) -> str:
        """Return the kinds with their counts, most frequent first; "nothing" without any."""
        kinds = [f"{count} {kind}" for kind, count in self.skipped.most_common(_KINDS_MAX)]
        if rest := sum(self.skipped.values()) - sum(count for _, count in self.skipped.most_common(_KINDS_MAX)):
            kinds.append(f"{rest} others")
        return ", ".join(kinds) or "nothing"


def find_files(source: TextSource, skipped: Counter[str] | None = None) -> Iterator[FoundFile]:
    """Yield each regular file with a suffix of text, in no order; `skipped` counts the others by kind. Links to files
    are followed, links to folders are not."""
    counts = Counter[str]() if skipped is None else skipped

    def unreadable(error: OSError) -> None:
        counts["unreadable"] += 1

    for folder, subfolders, names in _walk(source.root, unreadable):
        subfolders[:] = [name for name in subfolders if name not in source.passed_over]
        for name in names:
            path = Path(folder, name)
            suffix, packing = suffixes_of(path)
            if suffix not in source.suffixes or (packing and not source.is_users):
                if source.is_users:
                    counts[_shown(path.suffix.lower())] += 1
                continue
            try:
                found = path.stat()
            except OSError:  # a link to nowhere, or just deleted
                counts["unreadable"] += 1
                continue
            if stat.S_ISREG(found.st_mode):
                key = path.relative_to(source.root).as_posix() if path != source.root else path.name
                yield FoundFile(os.fsencode(key), path, found.st_size)
            else:
                counts["not regular"] += 1


def _walk(root: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
    if root.is_dir():
        yield from os.walk(root, onerror=onerror)
    else:
        yield str(root.parent), [], [root.name]


def read_texts(source: TextSource, max_bytes: int, separator: bytes = EMPTY_LINE) -> Texts:
    """Read the text files in the order of their paths, until `max_bytes` bytes of files, unpacked, are read. The file
    that the limit falls into is cut after a line. `separator` stands between the texts of a .jsonl or .parquet file.
    Raises ConfigError where a library for them is missing."""
    texts = Texts()
    room = max_bytes
    for file in sorted(find_files(source, texts.skipped), key=lambda file: file.key):
        if not room:
            texts.skipped["past the limit"] += 1
            texts.truncated = True
            continue
        try:
            reader = _Reader(room, separator, source.field)
            reader.read(file.path)
        except OSError:
            texts.skipped["unreadable"] += 1
            continue
        except NoText as reason:
            texts.skipped[str(reason)] += 1
            continue
        finally:
            texts.has_field |= reader.has_field
            if not reader.has_field and len(texts.other_fields) < _FIELDS_MAX:
                texts.other_fields.update(reader.other_fields)
            if reader.malformed:
                texts.skipped[f"lines of {suffixes_of(file.path)[0]} without a text"] += reader.malformed
        room -= reader.read_bytes
        texts.truncated |= reader.is_cut
        texts.files.append(FileText(file.key, reader.text, reader.documents or 1))
    return texts


class _Reader:
    """The text of one file, read in pieces of a bounded size up to `room` bytes."""

    def __init__(self, room: int, separator: bytes, field: str) -> None:
        self.text = bytearray()
        self.read_bytes = 0
        self.is_cut = False
        """Whether the file is longer than `room`."""
        self.malformed = 0
        """Lines of a .jsonl or .parquet file that have no text."""
        self.documents = 0
        """Its lines that have one."""
        self.has_field = False
        self.other_fields: list[str] = []
        """Fields with text that a .parquet file without the field has, and the first line of a .jsonl file without."""
        self._room = room
        self._separator = separator
        self._field = field
        self._lines = _lines_with(field)

    def read(self, path: Path) -> None:
        """Read the file once. Raises OSError, and NoText for what is no text."""
        suffix, packing = suffixes_of(path)
        with _open_regular(path) as file, unpacking(file, packing) as content:
            if suffix == PARQUET:
                self._take_table(content)
            elif suffix == ".jsonl":
                self._take_lines(content)
            else:
                self._take_text(content)
        if not self.text:
            raise NoText("empty")

    def _take_text(self, file: BinaryIO) -> None:
        for piece in self._decoded(file):
            self.text += piece
        if self.is_cut:
            end = self.text.rfind(b"\n", max(0, len(self.text) - LINE_CUT_BYTES)) + 1
            if end:
                del self.text[end:]

    def _take_lines(self, file: BinaryIO) -> None:
        """Take the field `text` of each line. A line that the limit cuts is left out."""
        line = bytearray()
        for piece in self._decoded(file):
            *ended, rest = piece.split(b"\n")
            for end in ended:
                line += end
                self._take_line(line)
                line.clear()
            line += rest
        if not self.is_cut:
            self._take_line(line)

    def _take_line(self, line: bytearray) -> None:
        if not line.strip():
            return
        try:
            text = self._lines.decode(line).text
        except MALFORMED:
            self.malformed += 1
            if self.malformed == 1:
                self.other_fields = _fields_with_text(line)
            return
        self.has_field = True
        self._take_document(text.encode(errors="replace"))

    def _take_table(self, file: BinaryIO) -> None:
        """Take a document of each row. The one that the limit cuts is left out."""
        try:
            self._take_rows(rows_of(file, self._field))
        except NoField as error:
            self.other_fields = error.others
            raise

    def _take_rows(self, rows: Iterator[bytes | None]) -> None:
        for row in rows:
            self.has_field = True
            if row is None:
                self.malformed += 1
                continue
            size_bytes = len(row) + len(self._separator)
            self.is_cut = self.read_bytes + size_bytes > self._room
            if self.is_cut:
                self.read_bytes = self._room
                break
            self.read_bytes += size_bytes
            self._take_document(row.decode(errors="replace").encode())

    def _take_document(self, text: bytes) -> None:
        if text and self.text:
            self.text += self._separator
        self.text += text
        self.documents += bool(text)

    def _decoded(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the file's text as UTF-8, in whole characters, up to `room` bytes of the file."""
        head = file.read(min(_MARK_BYTES_MAX, self._room))
        self.read_bytes = len(head)
        mark, encoding = next(((mark, name) for mark, name in _MARKS if head.startswith(mark)), (b"", "utf-8"))
        decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        chunk = head[len(mark) :]
        while True:
            if encoding == "utf-8" and b"\0" in chunk:
                raise NoText("binary")
            yield decoder.decode(chunk).encode()
            chunk = file.read(min(_CHUNK_BYTES, self._room - self.read_bytes))
            if not chunk:
                break
            self.read_bytes += len(chunk)
        self.is_cut = self.read_bytes == self._room and bool(file.read(1))
        if not self.is_cut:
            yield decoder.decode(b"", final=True).encode()


@cache
def _lines_with(field: str) -> msgspec.json.Decoder[Any]:
    """Return a decoder of lines of a .jsonl file to their `text`, which is in that field; others are passed over."""
    return msgspec.json.Decoder(msgspec.defstruct("Line", [("text", str)], rename={"text": field}))


def _fields_with_text(line: bytearray) -> list[str]:
    """Return which fields of a line hold a string; [] for one that is no JSON object."""
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except MALFORMED:
        return []
    return [name for name, value in found.items() if bytes(value).lstrip().startswith(b'"')]


def _open_regular(path: Path) -> BinaryIO:
    """Open a file that may have become a pipe since it was found, without waiting for a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NoText("not regular")
    return open(fd, "rb", buffering=0)


def _shown(suffix: str) -> str:
    """Return an unknown suffix as the account names it."""
    shown = os.fsencode(suffix).decode(errors="replace")
    return shown[:_SUFFIX_CHARS_MAX] if shown.isprintable() and shown else "without a suffix"
