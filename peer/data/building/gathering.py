"""The first pass of a build: files to documents, documents to ids, ids into buckets.

One thread reads and hashes documents while another tokenizes those before. After each 64 MB a journal says how far the
buckets are: another process continues from there, and cuts off what was written since.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from peer.bounds import Number, Text
from peer.data.building.buckets import BucketWriter, read_bucket
from peer.data.building.documents import ROW_BYTES_MAX, VALUE_BYTES_MAX, DocumentKeys, documents_of
from peer.data.building.marking import marked_text
from peer.data.building.plan import BUCKETS_MAX, BuildPlan, read_note, write_note
from peer.data.chat_template import ChatTemplateCode
from peer.data.conversations import MarkedText, decode_conversation
from peer.data.packed_files import NoText
from peer.data.pages.index import dtype_of
from peer.data.text_files import EMPTY_LINE, TextReader
from peer.data.tokenizer import Ids, Tokenizer
from peer.errors import ConfigError
from peer.plain_text import plain

JOURNAL: Final = "journal"
BUCKETS: Final = "buckets"
NAMES_MAX: Final = 10
KNOWN_ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[EOS]")
"""Special tokens that end a text, in the order in which they are looked for."""
_NAME_CHARS_MAX: Final = 200
_FIELD_CHARS_MAX: Final = 24
_EMPTY: Final = "empty"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_AHEAD: Final = 3
_KINDS_MAX: Final = 100
_CHUNK_BYTES: Final = 1 << 20
_LOOK_S: Final = 1.0


class GatheredText(msgspec.Struct, kw_only=True):
    """The result of the first pass, as far as it is."""

    vocab_size: Number = 0
    end_of_text: Text = ""
    """"" for an empty line."""
    sizes: Annotated[list[Number], msgspec.Meta(max_length=BUCKETS_MAX)] = []
    """Of the buckets."""
    documents: Number = 0
    text_bytes: Number = 0
    tokens: Number = 0
    skipped: Annotated[dict[Text, Number], msgspec.Meta(max_length=1000)] = {}
    """Files, lines and entries without a text, by kind."""
    unreadable: Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=NAMES_MAX)] = []
    """The first files that could not be read, each with the reason."""
    unreadable_files: Number = 0
    counted: Number = 0
    """Of the tokens: those that count in the loss, of conversations."""
    marked: Annotated[dict[Text, Number], msgspec.Meta(max_length=8)] = {}
    """Conversations by how it was found what of them counts."""
    replaced: Number = 0
    """Files with invalid characters, which are U+FFFD in their text."""
    has_field: bool = False
    """Whether a JSON or .parquet file has the field of texts."""
    other_fields: Annotated[list[Text], msgspec.Meta(max_length=NAMES_MAX)] = []
    """Fields with text in such files as have it not."""


class _Journal(msgspec.Struct, kw_only=True):
    plan: bytes
    file: Number = 0
    document: Number = 0
    """Of that file: so many are in the buckets."""
    is_done: bool = False
    boot: Text = ""
    """Names the time since the machine was started; "" where the system does not say."""
    gathered: GatheredText = msgspec.field(default_factory=GatheredText)


@dataclass(frozen=True)
class _Document:
    key: bytes
    text: bytes


@dataclass(frozen=True)
class _FileEnd:
    """What there is to say of a file, once its documents are read."""

    name: str
    reader: TextReader
    refusal: str
    """Why a file, or its rest, could not be read; "" if it could."""


@dataclass
class Gathering:
    """The first pass of a plan. Files lie in `folder`, which no other process writes."""

    plan: BuildPlan
    folder: Path
    tokenizer: Tokenizer
    is_strict: bool = False
    """Whether a file that cannot be read ends the build."""
    progress: Callable[[int], None] = lambda size_bytes: None
    """Takes the bytes of files that are behind."""
    _journal: _Journal = field(init=False)
    _writer: BucketWriter = field(init=False)
    _ahead: deque[_Document | _FileEnd] = field(init=False, default_factory=deque)
    """Documents whose ids are not there yet, and the ends of files between them."""

    def run(self) -> GatheredText:
        """Fill the buckets. Raises ConfigError for an option that the tokenizer does not go with, a missing library,
        and with `is_strict` a file that cannot be read; OSError if the buckets cannot be written."""
        end = end_token(self.plan, self.tokenizer)
        kind = np.dtype(dtype_of(self.tokenizer.vocab_size)).newbyteorder("<")
        mark = np.asarray(self.tokenizer.encode(end or EMPTY_LINE.decode()), kind)
        self._open()
        found = self._journal.gathered
        if self._journal.is_done:
            return found
        found.vocab_size, found.end_of_text = self.tokenizer.vocab_size, end
        kind = np.dtype("<u4") if self.plan.is_chat else kind
        mark = mark.astype(kind)
        for ids, text_bytes in self._encoded():
            self._take_ends()
            document = self._ahead.popleft()
            assert isinstance(document, _Document)
            self._journal.document += 1
            if self.plan.is_chat and not len(ids):  # nothing of it counts
                continue
            self._writer.add(document.key, text_bytes or len(document.text), ids.astype(kind).tobytes(), mark.tobytes())
            found.documents += 1
            found.text_bytes += text_bytes or len(document.text)
            found.tokens += len(ids) + len(mark)
            if self._writer.buffered_bytes >= self.plan.flush_bytes:
                self._note(kind.itemsize)
        self._take_ends()
        self._journal.is_done = True
        self._note(kind.itemsize)
        return found

    def _encoded(self) -> Iterator[tuple[Ids | npt.NDArray[np.uint32], int]]:
        """Yield the ids of each document, with `MARK` on those that count where not all do, and the bytes of the text
        that was made of a conversation, 0 for a document that is its own text. Of a conversation that cannot be trained
        on there are no ids."""
        if not self.plan.is_chat:
            for ids in self.tokenizer.encode_texts(self._texts()):
                yield ids, 0
            return
        made = deque[MarkedText]()
        for ids, counts in self.tokenizer.encode_marked(self._marked(made)):
            text = made.popleft()
            found = self._journal.gathered
            if not counts.any():
                reason = "of which nothing counts" if text.text else text.how
                kind = plain(f"conversations {reason}", 100)
                if kind in found.skipped or len(found.skipped) < _KINDS_MAX:
                    found.skipped[kind] = found.skipped.get(kind, 0) + 1
                yield ids[:0], 0
                continue
            found.counted += int(counts.sum())
            found.marked[text.how] = found.marked.get(text.how, 0) + 1
            yield ids.astype(np.uint32) | (counts.astype(np.uint32) << 31), len(text.text.encode())

    def _marked(self, made: deque[MarkedText]) -> Iterator[MarkedText]:
        """Yield the texts of conversations, which are put into `made` as well; an empty one for a conversation that
        cannot be trained on."""
        code = ChatTemplateCode(self.plan.chat_template, self.plan.bos, self.plan.eos)
        for encoded in self._texts():
            try:
                text = marked_text(code, decode_conversation(encoded.encode()))
                if len(text.text.encode()) > ROW_BYTES_MAX:
                    raise ValueError(f"of more than {ROW_BYTES_MAX >> 20} MiB")
            except ValueError as reason:
                text = MarkedText("", (), str(reason))
            made.append(text)
            yield text

    def _open(self) -> None:
        path, count = self.folder / JOURNAL, self.plan.buckets
        self._writer = BucketWriter(self.folder / BUCKETS, count)
        found = read_note(path, _Journal)
        sizes = found.gathered.sizes if found is not None and found.plan == self.plan.digest else []
        if found is None or len(sizes) != count or not self._writer.open(sizes) or not self._is_intact(found):
            self._writer.open([])
            found = _Journal(plan=self.plan.digest)
        found.boot = _boot()
        self._journal = found

    def _is_intact(self, found: _Journal) -> bool:
        """Whether the buckets are what was written. Only a machine that stops loses what another process wrote."""
        if found.boot and found.boot == _boot():
            return True
        sizes, vocab_size = found.gathered.sizes, found.gathered.vocab_size
        try:
            for number, size_bytes in enumerate(sizes):
                read_bucket(self.folder / BUCKETS, number, len(sizes), size_bytes, vocab_size, self.plan.is_chat)
        except ValueError:
            return False
        return True

    def _note(self, id_bytes: int) -> None:
        self._writer.flush(id_bytes)
        self._journal.gathered.sizes = [*self._writer.sizes]
        write_note(self.folder / JOURNAL, self._journal)

    def _texts(self) -> Iterator[str]:
        for item in _read_ahead(self._items()):
            self._ahead.append(item)
            if isinstance(item, _Document):
                yield item.text.decode()

    def _items(self) -> Iterator[_Document | _FileEnd]:
        """Yield the documents that are in no bucket yet, and the end of each file. Runs in a thread of its own."""
        keys, first, known = DocumentKeys(self.plan.seed), self._journal.file, self._journal.document
        behind = sum(file.size_bytes for file in self.plan.files[:first])
        for number, file in enumerate(self.plan.files[first:], first):
            path, count, refusal = Path(os.fsdecode(file.path)), 0, ""
            reader = TextReader(field=self.plan.field, value_bytes_max=VALUE_BYTES_MAX, chat=self.plan.is_chat)
            try:
                for text in documents_of(reader, path):
                    count += 1
                    if number > first or count > known:
                        yield _Document(keys.of(text), text)
                    self.progress(behind + min(reader.position, file.size_bytes))
            except OSError as error:
                refusal = f"unreadable: {error.strerror}"
            except NoText as reason:
                refusal = str(reason)
            refusal = refusal or ("" if count else str(reader.refusal()))
            behind += file.size_bytes
            self.progress(behind)
            yield _FileEnd(plain(os.fsencode(path).decode(errors="replace"), _NAME_CHARS_MAX), reader, refusal)

    def _take_ends(self) -> None:
        """Take in the ends of files before the next document."""
        while self._ahead and isinstance(end := self._ahead[0], _FileEnd):
            self._ahead.popleft()
            self._journal.file += 1
            self._journal.document = 0
            self._count(end)

    def _count(self, end: _FileEnd) -> None:
        found, reader = self._journal.gathered, end.reader
        counts = dict(reader.lost)
        if end.refusal:
            kind = end.refusal.partition(":")[0]
            counts[kind] = counts.get(kind, 0) + 1
        if end.refusal not in ("", _EMPTY):
            if self.is_strict:
                raise ConfigError(f"{end.name} cannot be read ({end.refusal}): repair it, or leave --strict out")
            found.unreadable_files += 1
            if len(found.unreadable) < NAMES_MAX:
                found.unreadable.append(f"{end.name} ({end.refusal})")
        for kind, count in counts.items():
            kind = plain(kind, 100)
            found.skipped[kind] = found.skipped.get(kind, 0) + count
        found.replaced += reader.is_replaced
        found.has_field |= reader.has_field
        if not reader.has_field:
            names = [plain(name, _FIELD_CHARS_MAX) for name in reader.other_fields]
            found.other_fields = [*dict.fromkeys((*found.other_fields, *names))][:NAMES_MAX]


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def end_token(plan: BuildPlan, tokenizer: Tokenizer) -> str:
    """Return the special token after each document, "" for an empty line. Raises ConfigError for one that the plan
    names and the tokenizer has not."""
    named = plan.end_of_text
    for token in KNOWN_ENDS if named is None else filter(None, (named,)):
        ids = tokenizer.encode(token)
        if len(ids) == 1 and ids[0] in tokenizer.special:
            return token
    if named:
        raise ConfigError(f"--end-of-text {named!r} is no special token of the tokenizer: name one that is")
    return ""


def _read_ahead(items: Iterator[_Document | _FileEnd]) -> Iterator[_Document | _FileEnd]:
    """Yield the items, which a thread reads ahead by some megabytes."""
    chunks = queue.Queue[list[_Document | _FileEnd] | BaseException | None](_AHEAD)
    is_over = threading.Event()

    def put(chunk: list[_Document | _FileEnd] | BaseException | None) -> None:
        while not is_over.is_set():
            with suppress(queue.Full):
                return chunks.put(chunk, timeout=_LOOK_S)

    def read() -> None:
        chunk, size_bytes = list[_Document | _FileEnd](), 0
        try:
            for item in items:
                chunk.append(item)
                size_bytes += len(item.text) if isinstance(item, _Document) else 0
                if size_bytes >= _CHUNK_BYTES:
                    put(chunk)
                    chunk, size_bytes = [], 0
                if is_over.is_set():
                    return
            put(chunk)
            put(None)
        except BaseException as error:  # noqa: BLE001  raised again where the items are taken
            put(error)

    thread = threading.Thread(target=read, name="reader", daemon=True)
    thread.start()
    try:
        while (chunk := chunks.get()) is not None:
            if isinstance(chunk, BaseException):
                raise chunk
            yield from chunk
    finally:
        is_over.set()
        thread.join()
