"""What a data set is built from, and the files of a build that survive its process.

A plan names each file with its size and time: a build continues where an earlier one with the same plan has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from blake3 import blake3

from peer.bounds import HASH_BYTES, Number
from peer.data.conversations import MESSAGES
from peer.data.folder_files import FoundFile
from peer.data.packed_files import RATIO, TEXT, is_packed
from peer.data.pages.index import Line, PageIndex, PagePart, dtype_of
from peer.data.tokenizer import BYTES
from peer.decoding import MALFORMED, decoder_of
from peer.errors import ResourceError
from peer.files import read_bounded

BUCKETS_MAX: Final = 512
FLUSH_BYTES: Final = 64 << 20
_BUCKET_BYTES: Final = 48 << 20
_NOTE_BYTES_MAX: Final = 256 << 20
_Note = TypeVar("_Note", bound=msgspec.Struct)


class PlannedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of text. One with another size or time is another file."""

    path: bytes
    """In the file system's bytes: names need not be UTF-8."""
    size_bytes: int
    mtime_ns: int


class BuildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The files and options that a data set follows from, and the number of buckets, on which it does not depend."""

    files: list[PlannedFile]
    seq_len: int
    tokenizer: str
    """"bytes", or the hex blake3 of the tokenizer.json."""
    tokenizers: str = ""
    """The release of the library; "" for bytes."""
    text_field: str = ""
    """The field with the text in JSON and .parquet files; "" for `text`."""
    end_of_text: str | None = None
    """The special token after each document; None for the one that the tokenizer is known to have."""
    seed: Number = 0
    validation_share: float = 0.05
    license: Line = ""
    source: Line = ""
    chat_template: str = ""
    """Of conversations, whose answers alone count in the loss; "" for texts, all of which counts."""
    bos: str = ""
    """The token of that name in the template, as `eos`."""
    eos: str = ""
    buckets: Annotated[int, msgspec.Meta(ge=1, le=BUCKETS_MAX)] = 1
    """A power of two."""
    flush_bytes: Number = FLUSH_BYTES
    """Between two entries of the journal."""

    @property
    def field(self) -> str:
        """The name of the field with the text, or with the messages."""
        return self.text_field or (MESSAGES if self.is_chat else TEXT)

    @property
    def is_chat(self) -> bool:
        """Whether documents are conversations."""
        return bool(self.chat_template)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> bytes:
        """The hash of the plan, 32 bytes."""
        return blake3(msgspec.msgpack.encode(self)).digest()

    def index(self, vocab_size: int, end_of_text: str) -> PageIndex:
        """Return the index that the pages will have, with one page of each part. Raises ValueError for options that no
        index has."""
        part = PagePart(windows=1, documents=1, text_bytes=1, hashes=bytes(HASH_BYTES))
        return PageIndex(
            seq_len=self.seq_len,
            vocab_size=vocab_size,
            dtype=dtype_of(vocab_size),
            masked=self.is_chat,
            chat_template=blake3(self.chat_template.encode()).hexdigest() if self.is_chat else "",
            tokenizer=self.tokenizer,
            tokenizers=self.tokenizers,
            end_of_text=end_of_text,
            seed=self.seed,
            validation_share=self.validation_share,
            license=self.license,
            source=self.source,
            train=part,
            held_out=part,
        )


def planned(found: FoundFile) -> PlannedFile:
    """Return a file with its size and time. Raises OSError."""
    path = found.path.absolute()
    now = path.stat()
    return PlannedFile(os.fsencode(path), now.st_size, now.st_mtime_ns)


def bucket_count(files: list[PlannedFile], tokenizer: str) -> int:
    """Return the number of buckets for these files: a power of two, each bucket of some 24 to 48 MiB of ids."""
    size_bytes = sum(
        file.size_bytes * (RATIO if is_packed(Path(os.fsdecode(file.path))) else 1) * (2 if tokenizer == BYTES else 1)
        for file in files
    )
    count = 1
    while count < BUCKETS_MAX and count * _BUCKET_BYTES < size_bytes:
        count *= 2
    return count


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file by a complete one that survives a power cut, or leave it as it was. Raises OSError."""
    partial = path.with_name(f"{path.name}.part")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_note(path: Path, note: msgspec.Struct) -> None:
    """Write a file for `read_note`. Raises OSError."""
    content = msgspec.msgpack.encode(note)
    replace_file(path, blake3(content).digest() + content)


def read_note(path: Path, kind: type[_Note]) -> _Note | None:
    """Return what `write_note` has written; None where there is no such file, or a damaged one."""
    try:
        found = read_bounded(path, _NOTE_BYTES_MAX)
        digest, content = found[:HASH_BYTES], found[HASH_BYTES:]
        return decoder_of(kind).decode(content) if blake3(content).digest() == digest else None
    except (OSError, *MALFORMED):
        return None


def unwritable_out(path: Path, error: OSError) -> ResourceError:
    """Return the error for a file of the build that could not be written, with the remedy."""
    why = error.strerror or str(error)
    return ResourceError(f"cannot write {path} ({why}): free some space, or choose another folder with --out")
