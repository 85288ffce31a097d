"""Text to token ids and back: raw bytes by default, or a Hugging Face `tokenizer.json` of known cost.

The library is Rust. A panic there arrives as an exception outside of Python's `Exception`, and becomes a ConfigError
here.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from peer.data.conversations import MarkedText
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX, check_tokenizer
from peer.decoding import told
from peer.errors import ConfigError
from peer.files import read_bounded

Ids = npt.NDArray[np.uint8] | npt.NDArray[np.int32]
Marks = npt.NDArray[np.bool_]
BYTES = "bytes"
_PIECE_CHARACTERS = 1 << 16
_BATCH_PIECES = 64
_BATCH_CHARACTERS = 2 << 20
_LINE_CHARACTERS_MAX = 1 << 18
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""How the vocabularies of SentencePiece write a byte."""


class Tokenizer(Protocol):
    """Converts text to ids in [0, vocab_size) and back. `decode` never raises on ids in range: invalid UTF-8 becomes
    U+FFFD.

    `fingerprint` is equal if the ids are; it is None if encoding is too cheap to be worth caching. `special` are the
    ids of special tokens, such as one that ends a message.
    """

    vocab_size: int
    fingerprint: bytes | None
    special: frozenset[int]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text. `special`: with what a tokenizer.json puts around it, such as a token before it."""
        ...

    def encode_file(self, data: bytes) -> Ids:
        """Return a whole file's ids as one compact array."""
        ...

    def encode_texts(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Yield the ids of each text by itself, in batches that use every core: memory does not grow with a text."""
        ...

    def encode_marked(self, texts: Iterable[MarkedText]) -> Iterator[tuple[Ids, Marks]]:
        """Yield the ids of each text by itself, and which of them count in the loss: those that begin in a span."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def bytes_of(self, id: int) -> bytes | None:
        """Return the bytes of a token that is a part of a letter, which `decode` cannot show; None where the tokenizer
        does not say."""
        ...

    def save(self, folder: Path) -> None:
        """Write files that `transformers.AutoTokenizer` loads to the same ids."""
        ...


class ByteTokenizer:
    """One id a byte, 0..255, no special tokens. The loss in nats a token equals the loss in nats a byte."""

    vocab_size = 256
    fingerprint: bytes | None = None
    special: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_file(self, data: bytes) -> Ids:
        return np.frombuffer(data, dtype=np.uint8)

    def encode_texts(self, texts: Iterable[str]) -> Iterator[Ids]:
        return (self.encode_file(text.encode()) for text in texts)

    def encode_marked(self, texts: Iterable[MarkedText]) -> Iterator[tuple[Ids, Marks]]:
        raise ConfigError("bytes have no chat template: name the tokenizer of a chat model")

    def decode(self, ids: list[int]) -> str:
        return bytes(min(id, 255) for id in ids).decode(errors="replace")  # 255 is in no UTF-8: ids without a byte

    def bytes_of(self, id: int) -> bytes | None:
        return bytes([id]) if id < 256 else None

    def save(self, folder: Path) -> None:
        """Write a byte-level BPE without merges, whose vocabulary is the printable stand-in of each byte."""
        bpe = HubTokenizer(models.BPE(vocab={_stand_in(byte): byte for byte in range(256)}, merges=[]))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        _save_hub(bpe, folder)


class FileTokenizer:
    """A `tokenizer.json`."""

    def __init__(self, tokenizer: HubTokenizer) -> None:
        self._tokenizer = tokenizer
        # ids may have gaps, so the size follows from the highest id, not the number of entries
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.fingerprint: bytes | None = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).digest()
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        with panics_as_errors():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def encode_file(self, data: bytes) -> Ids:
        """Encode pieces cut at line ends: a batch uses every core and lets other threads run. The library takes a
        hundred bytes a token and more, so a batch is a part of the file."""
        pieces, ids = _pieces(data.decode(errors="replace")), list[npt.NDArray[np.int32]]()
        while batch := list(itertools.islice(pieces, _BATCH_PIECES)):
            with panics_as_errors():
                encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ids.extend(np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings)
        return np.concatenate(ids)

    def encode_texts(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Encode pieces cut at line ends, those of a long line anywhere. A batch holds pieces of several texts."""
        of_text = list[npt.NDArray[np.int32]]()
        for batch in _batches(texts):
            with panics_as_errors():
                encodings = self._tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
            for encoding, (_, is_last) in zip(encodings, batch, strict=True):
                of_text.append(np.asarray(encoding.ids, dtype=np.int32))
                if is_last:
                    yield np.concatenate(of_text) if len(of_text) > 1 else of_text[0]
                    of_text = []

    def encode_marked(self, texts: Iterable[MarkedText]) -> Iterator[tuple[Ids, Marks]]:
        for batch in _bounded(texts):
            with panics_as_errors():
                encodings = self._tokenizer.encode_batch([each.text for each in batch], add_special_tokens=False)
            for encoding, each in zip(encodings, batch, strict=True):
                starts = np.array([start for start, _ in encoding.offsets], np.int64)
                marks = np.zeros(len(starts), np.bool_)
                for first, end in each.spans:
                    marks |= (starts >= first) & (starts < end)
                yield np.asarray(encoding.ids, dtype=np.int32), marks

    def decode(self, ids: list[int]) -> str:
        with panics_as_errors():
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def bytes_of(self, id: int) -> bytes | None:
        with panics_as_errors():
            piece = self._tokenizer.id_to_token(id) or ""
        if fallback := _BYTE.fullmatch(piece):
            return bytes([int(fallback[1], 16)])
        found = [_BYTE_OF.get(letter) for letter in piece]
        return bytes(byte for byte in found if byte is not None) if found and None not in found else None

    def save(self, folder: Path) -> None:
        _save_hub(self._tokenizer, folder)


def load_tokenizer(spec: str) -> Tokenizer:
    """Load `"bytes"`, or the path of a `tokenizer.json` or of a folder that holds one. Raises ConfigError."""
    if spec == BYTES:
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f'tokenizer {spec!r} does not exist: give "bytes" or the path of a tokenizer.json')
    try:
        content = read_bounded(path, TOKENIZER_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): check who owns it, and that it is a tokenizer.json"
        ) from error
    return read_tokenizer(content, str(path))


def read_tokenizer(content: bytes, name: str = "the run's tokenizer") -> Tokenizer:
    """Read the content of a `tokenizer.json`; `name` is its name in errors. Raises ConfigError."""
    check_tokenizer(content, name)
    with panics_as_errors(name):
        try:
            tokenizer = HubTokenizer.from_buffer(content)
        except Exception as error:  # the Rust binding raises bare Exception for malformed content
            raise ConfigError(f"{name} is not a tokenizer.json ({told(error)}): fetch it again") from error
        tokenizer.no_padding()  # a file may ask for both: text of any length comes out whole
        tokenizer.no_truncation()
        return FileTokenizer(tokenizer)


def _pieces(text: str) -> Iterator[str]:
    """Cut a text after lines, into pieces of about one size; at least one."""
    piece, size = list[str](), 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= _PIECE_CHARACTERS:
            yield "".join(piece)
            piece, size = [], 0
    yield "".join(piece)


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yield pieces of texts, and whether each is the last of its text, in lists of a bounded size."""
    batch, size = list[tuple[str, bool]](), 0
    for text in texts:
        pieces = [text] if len(text) <= _PIECE_CHARACTERS else [*_short_pieces(text)]
        for number, piece in enumerate(pieces, 1):
            batch.append((piece, number == len(pieces)))
            size += len(piece)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _bounded(texts: Iterable[MarkedText]) -> Iterator[list[MarkedText]]:
    """Yield texts in lists of a bounded size."""
    batch, size = list[MarkedText](), 0
    for text in texts:
        batch.append(text)
        size += len(text.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _short_pieces(text: str) -> Iterator[str]:
    """Cut a text after lines, and a line that is longer than several pieces anywhere; at least one, and none empty but
    that of an empty text."""
    for piece in _pieces(text):
        for at in range(0, len(piece), _LINE_CHARACTERS_MAX):
            yield piece[at : at + _LINE_CHARACTERS_MAX]


@contextmanager
def panics_as_errors(name: str = "the run's tokenizer") -> Iterator[None]:
    """Raise ConfigError where a library in Rust panics on the tokenizer of that `name`."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ConfigError(f"{name} makes its library panic ({str(error)[:200]}): use another tokenizer") from error


def _save_hub(tokenizer: HubTokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


def _stand_in(byte: int) -> str:
    """Return GPT-2's printable character for a byte: the byte itself if it is printable Latin-1, else one from U+0100
    on."""
    if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
        return chr(byte)
    unprintable = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(256 + unprintable.index(byte))


_BYTE_OF = {_stand_in(byte): byte for byte in range(256)}
