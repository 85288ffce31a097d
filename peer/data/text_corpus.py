"""The corpus of this machine's own text: a file or folder that its user has named, or the Python standard library.

The text is read by `peer.data.text_files`. Blocks of it are held out by hashes, so every peer splits alike
(`peer.data.held_out`). A window is chosen by a keyed permutation of all windows of an epoch.
"""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from peer.config import DataConfig
from peer.corpus_facts import CorpusFacts
from peer.data.folder_files import TOOL_FOLDERS, TextSource, find_files
from peer.data.held_out import split
from peer.data.packed_files import PARQUET, RATIO, TEXT, is_packed
from peer.data.permute import permute
from peer.data.text_files import EMPTY_LINE, TEXT_SUFFIXES, Texts, read_texts
from peer.data.tokenizer import Ids, Tokenizer
from peer.errors import ConfigError
from peer.plain_text import plain

_HEADER_BYTES = 128  # of an .npy file of one dimension
_BYTES_AN_ID_MIN = 2
_BYTES_A_TOKEN = 8  # more than tokenizers commonly put into one: so much text surely makes a window
_MEMORY_SHARE = 16  # while it is tokenized, a text takes about eight times its size
_NOT_PROSE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"})
_FIELDS_SHOWN = 8
_FIELD_CHARS_MAX = 24  # so that a sentence is not cut


@dataclass(frozen=True)
class TextCorpus:
    """The token ids of the training and the held-out text, 1-D. `digest` (32 bytes) is equal if both texts are."""

    train: Ids
    held_out: Ids
    digest: bytes
    seq_len: int
    facts: CorpusFacts
    has_marks = False

    @property
    def windows(self) -> int:
        """The number of samples in one epoch."""
        return (len(self.train) - 1) // self.seq_len

    @property
    def bytes_per_token(self) -> float:
        """The ratio in the held-out text, which converts a loss in nats a token to nats a byte."""
        return self.facts.held_out_bytes / len(self.held_out)

    def batch(self, numbers: list[int], seed: int) -> Tensor:
        """Return the samples with these numbers, (B, seq_len + 1) int64."""
        rows = [self._window(number, seed) for number in numbers]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def held_out_batches(self, batch_size: int, max_batches: int) -> Iterator[Tensor]:
        """Yield at most `max_batches` batches of windows, spread evenly over the held-out text; the same on every
        call."""
        windows = (len(self.held_out) - 1) // self.seq_len
        count = min(windows, batch_size * max_batches)
        starts = [index * windows // count * self.seq_len for index in range(count)]
        for at in range(0, count, batch_size):
            rows = [self.held_out[start : start + self.seq_len + 1] for start in starts[at : at + batch_size]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))

    def _window(self, number: int, seed: int) -> Ids:
        epoch, index = divmod(number, self.windows)
        start = permute(index, self.windows, f"{seed}:{epoch}") * self.seq_len
        return self.train[start : start + self.seq_len + 1]


def load_corpus(
    config: DataConfig, tokenizer: Tokenizer, folder: str = "", cache: Path | None = None, text_field: str = ""
) -> TextCorpus:
    """Read, split and tokenize the text. Raises ConfigError if there is too little text for one window, or no file has
    the field.

    `folder` is the folder of text that this machine's user has named, "" for none; so is `text_field`, of JSON and
    .parquet files. `cache` is a folder that keeps the ids of a slow tokenizer, so that a restarted worker is ready at
    once.
    """
    check_source(config, folder)
    source = _source(folder, text_field)
    if not os.path.exists(source.root):
        raise ConfigError(f"{str(source.root)!r} does not exist: name a file or folder of text with --data")
    separator = config.end_of_text.encode() if config.end_of_text else EMPTY_LINE
    texts = read_texts(source, config.max_bytes, separator)
    _check_field(source, texts, is_named=bool(text_field))
    files, documents = len(texts.files), sum(file.documents for file in texts.files)
    window_bytes = _BYTES_A_TOKEN * (config.seq_len + 1)
    train, held_out = split(texts.files, config.validation_share, window_bytes, separator)
    texts.files.clear()  # the memory for tokens
    digest = hashlib.blake2b(hashlib.blake2b(train).digest() + hashlib.blake2b(held_out).digest(), digest_size=32)
    train_ids, held_out_ids = _tokenize(train, tokenizer, cache), _tokenize(held_out, tokenizer, cache)
    account = _account(source, texts, (files, documents), (len(train), len(held_out)), config.max_bytes)
    if min(len(train_ids), len(held_out_ids)) <= config.seq_len:
        raise ConfigError(
            f"{source.root} holds too little text, {len(train_ids)} tokens to train on and {len(held_out_ids)} held "
            f"out, where each part needs {config.seq_len + 1} ({account}): add text or lower data.seq_len"
        )
    facts = CorpusFacts(
        files=files,
        documents=documents,
        train_bytes=len(train),
        held_out_bytes=len(held_out),
        train_tokens=len(train_ids),
        held_out_tokens=len(held_out_ids),
        truncated=texts.truncated,
        account=account,
    )
    return TextCorpus(train_ids, held_out_ids, digest.digest(), config.seq_len, facts)


def check_source(config: DataConfig, folder: str) -> None:
    """Raise ConfigError if the run wants text of the user's own and the user has named no folder, or one whose name
    cannot be passed on to a worker."""
    if config.source == "folder" and not folder:
        raise ConfigError("this run trains on text of your own: name a file or folder of text with --data PATH")
    try:
        folder.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the folder's name {folder!a} is not UTF-8: rename it or name a link to it") from error


def within_memory(config: DataConfig, memory_bytes: float) -> DataConfig:
    """Return the run's settings for a machine of this much memory: it reads less of a large folder than the run allows,
    at most a sixteenth of its memory. The bytes that it reads are the first of what other machines read."""
    most = max(1, int(min(memory_bytes / _MEMORY_SHARE, config.max_bytes)))
    return msgspec.structs.replace(config, max_bytes=most)


def token_cache_bytes(config: DataConfig, folder: str = "") -> int:
    """Return the bytes that `cache` of `load_corpus` takes: four for each id. A text has at most one id for two bytes;
    commonly one for four. Reads no text. Unreadable files count as none. A data set has no such copy."""
    if config.source == "pages" or (config.source == "folder" and not folder):
        return 0
    size_bytes = sum(file.size_bytes * (RATIO if is_packed(file.path) else 1) for file in find_files(_source(folder)))
    return min(size_bytes, config.max_bytes) * np.dtype(np.int32).itemsize // _BYTES_AN_ID_MIN


def has_text(config: DataConfig, folder: str = "") -> bool:
    """Whether this machine has any text for `load_corpus`."""
    if config.source == "folder" and not folder:
        return False
    return next(find_files(_source(folder)), None) is not None


def has_packed_text(folder: str) -> bool:
    """Whether a library has to unpack text of this folder, or of the file of that name."""
    return bool(folder) and any(is_packed(file.path) for file in find_files(_source(folder)))


def _source(folder: str, text_field: str = "") -> TextSource:
    if folder:
        field = text_field or TEXT
        return TextSource(Path(folder), TEXT_SUFFIXES, TOOL_FOLDERS, is_users=True, field=field)
    return TextSource(Path(sysconfig.get_paths()["stdlib"]), frozenset({".py"}), _NOT_PROSE, is_users=False)


def _check_field(source: TextSource, texts: Texts, *, is_named: bool) -> None:
    """Raise ConfigError if no file has the field that holds the text, where the user has named it or nothing else was
    read. Field names in the error are cut, and shown without control characters."""
    if texts.has_field or texts.truncated or not (is_named or (texts.lacks_field and not texts.files)):
        return
    names = [repr(plain(name, _FIELD_CHARS_MAX)) for name in sorted(texts.other_fields)[:_FIELDS_SHOWN]]
    more = ", ..." if len(texts.other_fields) > _FIELDS_SHOWN else ""
    if names:
        remedy = f"give --text-field one of {', '.join(names)}{more}"
    elif texts.files:
        remedy = "leave --text-field out"
    else:
        written = f"write each text on a line of its own as an object with the field {source.field!r}"
        remedy = f"{written}, or name plain text .txt"
    where = f"no JSON or {PARQUET} file in {str(source.root)!r} has text in a field {source.field!r}"
    raise ConfigError(f"{where} (skipped {texts.skipped_text()}): {remedy}")


def _account(source: TextSource, texts: Texts, counts: tuple[int, int], sizes: tuple[int, int], max_bytes: int) -> str:
    """Return what was read and what was not, sizes in bytes, as one sentence. It names the suffixes that are read where
    a file has another."""
    (files, documents), (train, held_out) = counts, sizes
    inside = f" ({documents} texts)" if documents > files else ""
    limit = f"; no more than the first {_size(max_bytes)} are read" if texts.truncated else ""
    invalid = f"; {_several(texts.replaced)} with invalid characters, read as U+FFFD" if texts.replaced else ""
    suffixes = f"; suffixes read {' '.join(sorted(source.suffixes))}, and these with .gz or .zst"
    return (
        f"{_several(files)}{inside} read, {_size(train)} to train on and {_size(held_out)} held out;"
        f" skipped {texts.skipped_text()}{limit}{invalid}{suffixes if texts.has_other_suffixes else ''}"
    )


def _several(files: int) -> str:
    return f"{files} file{'' if files == 1 else 's'}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"


def _tokenize(text: bytes, tokenizer: Tokenizer, cache: Path | None) -> Ids:
    if cache is None or tokenizer.fingerprint is None:
        return tokenizer.encode_file(text)
    name = hashlib.blake2b(hashlib.blake2b(text).digest() + tokenizer.fingerprint, digest_size=16).hexdigest()
    path = cache / f"tokens-{name}.npy"
    with suppress(OSError, ValueError):  # missing, or damaged by a crash: written again
        return map_ids(path, tokenizer.vocab_size)
    write_ids(path, tokenizer.encode_file(text))
    return map_ids(path, tokenizer.vocab_size)


def write_ids(path: Path, ids: Ids) -> None:
    """Write a file for `map_ids`: whole, or not at all. Raises OSError."""
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.save(file, ids.astype(np.int32, copy=False), allow_pickle=False)
    os.replace(partial, path)


def map_ids(path: Path, vocab_size: int) -> Ids:
    """Map a file of token ids below `vocab_size`, as `np.save` writes it. Raises OSError, and ValueError for any other
    content: its header is compared, not parsed."""
    with path.open("rb") as file:
        found = file.read(_HEADER_BYTES)
        count = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // np.dtype(np.int32).itemsize
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": (count,)})
    if found != header.getvalue():
        raise ValueError("it is no array of token ids")
    if not count:
        return np.empty(0, np.int32)
    ids: Ids = np.memmap(path, dtype="<i4", mode="r", offset=_HEADER_BYTES, shape=(count,))
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError("it holds ids that are not in the vocabulary")
    return ids
