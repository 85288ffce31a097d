"""Small data sets of pages, written by the format's own definition and not by the code that builds them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from peer.data.pages.index import PageIndex, PagePart

PAGE_BYTES = 4 << 20


def ids_of(windows: int, seq_len: int, vocab_size: int, seed: int) -> np.ndarray:
    """Return random windows, (windows, seq_len + 1)."""
    kind = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    return np.random.default_rng(seed).integers(0, vocab_size, (windows, seq_len + 1), dtype=kind)


def marks_of(ids: np.ndarray, share: float) -> np.ndarray:
    """Return which of the ids count in the loss, about that share of them."""
    return np.random.default_rng(17).random(ids.shape) < share


def write_part(folder: Path, name: str, ids: np.ndarray, marks: np.ndarray | None = None) -> PagePart:
    """Write the files of one part, and return it. `marks`: which ids count in the loss, of the same shape."""
    rows = ids.astype(ids.dtype.newbyteorder("<")).view(np.uint8)
    if marks is not None:
        rows = np.concatenate([rows, np.packbits(marks, axis=1, bitorder="little")], axis=1)
    a_page = PAGE_BYTES // rows.shape[1]
    pages = [rows[at : at + a_page].tobytes() for at in range(0, len(ids), a_page)]
    a_file = (256 << 20) // (a_page * rows.shape[1])
    for at in range(0, len(pages), a_file):
        (folder / f"{name}-{at // a_file:05}.pages").write_bytes(b"".join(pages[at : at + a_file]))
    hashes = b"".join(blake3(page).digest() for page in pages)
    return PagePart(windows=len(ids), documents=len(ids), text_bytes=3 * ids.size, hashes=hashes)


def write_data_set(
    folder: Path,
    *,
    seq_len: int,
    windows: int,
    held_out: int = 4,
    vocab_size: int = 256,
    seed: int = 1,
    counting: float | None = None,
) -> tuple[PageIndex, np.ndarray, np.ndarray]:
    """Write a data set of random ids; return its index, and the windows to train on and those held out. `counting`:
    the share of ids that count in the loss, None for all, without marks; they are those of `marks_of`, below 16."""
    folder.mkdir(parents=True, exist_ok=True)
    train, rest = (ids_of(n, seq_len, vocab_size, seed + at) for at, n in enumerate((windows, held_out)))
    marks = [None if counting is None else marks_of(one, counting) for one in (train, rest)]
    for ids, counts in zip((train, rest), marks, strict=True):
        if counts is not None:
            ids[counts] %= 16
    index = PageIndex(
        seq_len=seq_len,
        vocab_size=vocab_size,
        dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
        tokenizer="bytes",
        masked=counting is not None,
        chat_template="" if counting is None else "0" * 64,
        validation_share=0.05,
        train=write_part(folder, "train", train, marks[0]),
        held_out=write_part(folder, "held-out", rest, marks[1]),
    )
    (folder / "index.msgpack").write_bytes(msgspec.msgpack.encode(index))
    return index, train, rest
