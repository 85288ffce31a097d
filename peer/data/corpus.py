"""Training text as one endless stream of numbered samples.

A corpus is a folder of text that this machine's user has named, or the Python standard library of this machine. A hash
of its relative path assigns each file to the training or the held-out text, so every peer splits alike. Sample `i` is a
window of seq_len + 1 tokens in epoch `i // windows`, chosen by a keyed permutation of the windows. So peers that take
disjoint ranges of numbers train on disjoint text, and no window repeats inside an epoch.
"""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peer.config import DataConfig
from peer.data.tokenizer import Ids, Tokenizer
from peer.errors import ConfigError

__all__ = ["Corpus", "DataConfig", "check_source", "has_text", "load_corpus", "permute", "sample_numbers"]

_SEPARATOR = b"\n\n"
_HEADER_BYTES = 128  # of an .npy file of one dimension
_BYTES_AN_ID_MIN = 2
_NOT_PROSE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
_TEXT_SUFFIXES = {
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".json",
    ".jsonl",
    ".csv",
    ".html",
    ".xml",
    ".tex",
    ".c",
    ".h",
    ".rs",
}


@dataclass(frozen=True)
class Corpus:
    """The token ids of the training and the held-out text, 1-D. `digest` (32 bytes) is equal if both texts are."""

    train: Ids
    held_out: Ids
    held_out_bytes: int
    digest: bytes
    seq_len: int
    truncated: bool

    @property
    def windows(self) -> int:
        """The number of samples in one epoch."""
        return (len(self.train) - 1) // self.seq_len

    @property
    def bytes_per_token(self) -> float:
        """The ratio in the held-out text, which converts a loss in nats a token to nats a byte."""
        return self.held_out_bytes / len(self.held_out)

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


def sample_numbers(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the numbers of half-open ranges, in order."""
    for start, stop in ranges:
        yield from range(start, stop)


def permute(index: int, size: int, key: str) -> int:
    """Return the image of `index` in a keyed permutation of range(size), in O(1) memory.

    A four-round Feistel network over the smallest even number of bits that holds `size`, repeated until the result is
    inside (Black and Rogaway, "Ciphers with arbitrary finite domains"): under four times on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for feistel_round in range(4):
            word = hashlib.blake2b(f"{key}:{feistel_round}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(word, "big") & mask)
        index = (left << half_bits) | right
        if index < size:
            return index


def load_corpus(config: DataConfig, tokenizer: Tokenizer, folder: str = "", cache: Path | None = None) -> Corpus:
    """Read, split and tokenize the text. Raises ConfigError if there is too little text for one window.

    `folder` is the folder of text that this machine's user has named, "" for none. `cache` is a folder that keeps the
    ids of a slow tokenizer, so that a restarted worker is ready at once.
    """
    check_source(config, folder)
    root, suffixes, skipped = _source(folder)
    if not root.is_dir():
        raise ConfigError(f"{str(root)!r} is not a folder: name a folder of text files with --data")
    files, truncated = _read(root, suffixes, skipped, config.max_bytes)
    train, held_out = _split(files, config.validation_share)
    digest = hashlib.blake2b(hashlib.blake2b(train).digest() + hashlib.blake2b(held_out).digest(), digest_size=32)
    corpus = Corpus(
        train=_tokenize(train, tokenizer, cache),
        held_out=_tokenize(held_out, tokenizer, cache),
        held_out_bytes=len(held_out),
        digest=digest.digest(),
        seq_len=config.seq_len,
        truncated=truncated,
    )
    if min(len(corpus.train), len(corpus.held_out)) <= config.seq_len:
        raise ConfigError(
            f"{root} holds too little text (its training and its held-out part need more than {config.seq_len} "
            "tokens each): add text or lower data.seq_len"
        )
    return corpus


def check_source(config: DataConfig, folder: str) -> None:
    """Raise ConfigError if the run wants text of the user's own and the user has named no folder."""
    if config.source == "folder" and not folder:
        raise ConfigError("this run trains on text of your own: name a folder of text files with --data DIR")


def token_cache_bytes(config: DataConfig, folder: str = "") -> int:
    """Return the bytes that `cache` of `load_corpus` takes: four for each id, of which a text has at most one for two
    bytes; tokenizers commonly make it one for four. Reads no text. What cannot be examined counts as none."""
    if config.source == "folder" and not folder:
        return 0
    size_bytes = 0
    for _, path in _find(*_source(folder)):
        with suppress(OSError):  # deleted meanwhile
            size_bytes += path.stat().st_size
    return min(size_bytes, config.max_bytes) * np.dtype(np.int32).itemsize // _BYTES_AN_ID_MIN


def has_text(config: DataConfig, folder: str = "") -> bool:
    """Whether this machine has any text for `load_corpus`."""
    if config.source == "folder" and not folder:
        return False
    return next(_find(*_source(folder)), None) is not None


def _source(folder: str) -> tuple[Path, set[str], set[str]]:
    """Return the folder, the suffixes of text files, and the subfolders to skip."""
    if folder:
        return Path(folder), _TEXT_SUFFIXES, {"__pycache__"}
    return Path(sysconfig.get_paths()["stdlib"]), {".py"}, _NOT_PROSE


def _tokenize(text: bytes, tokenizer: Tokenizer, cache: Path | None) -> Ids:
    if cache is None or tokenizer.fingerprint is None:
        return tokenizer.encode_file(text)
    name = hashlib.blake2b(hashlib.blake2b(text).digest() + tokenizer.fingerprint, digest_size=16).hexdigest()
    path = cache / f"tokens-{name}.npy"
    with suppress(OSError, ValueError):  # missing, or damaged by a crash: written again
        return map_ids(path, tokenizer.vocab_size)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.save(file, tokenizer.encode_file(text).astype(np.int32, copy=False), allow_pickle=False)
    os.replace(partial, path)
    return map_ids(path, tokenizer.vocab_size)


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


def _read(root: Path, suffixes: set[str], skipped: set[str], max_bytes: int) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return (hash of the relative path, content) of each text file, in the order of paths, and whether the limit cut
    any."""
    files: list[tuple[bytes, bytes]] = []
    room = max_bytes
    for relative, path in sorted(_find(root, suffixes, skipped)):
        try:
            content = path.read_bytes()
        except OSError:
            continue  # unreadable or just deleted: the corpus is the files that this user can read
        if len(content) > room:
            return files, True
        room -= len(content)
        files.append((hashlib.blake2b(relative.encode(), digest_size=8).digest(), content))
    return files, False


def _find(root: Path, suffixes: set[str], skipped: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield each text file with its relative path, in no order."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        for name in names:
            path = Path(folder, name)
            if path.suffix.lower() in suffixes:
                yield path.relative_to(root).as_posix(), path


def _split(files: list[tuple[bytes, bytes]], validation_share: float) -> tuple[bytes, bytes]:
    """Return the training and the held-out text. A file is held out if its hash, read as a fraction, is below the
    share; if none is, the file with the lowest hash. A single file is cut in two."""
    if len(files) == 1:
        content = files[0][1]
        cut = int(len(content) * (1 - validation_share))
        return content[:cut], content[cut:]
    below = int(validation_share * 2**64)
    lowest = min((digest for digest, _ in files), default=b"")
    held_out = {digest for digest, _ in files if int.from_bytes(digest, "big") < below} or {lowest}
    if len(held_out) == len(files):
        held_out = {lowest}
    train_text = _SEPARATOR.join(content for digest, content in files if digest not in held_out)
    return train_text, _SEPARATOR.join(content for digest, content in files if digest in held_out)
