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


def write_part(folder: Path, name: str, ids: np.ndarray) -> PagePart:
    """Write the files of one part, and return it."""
    a_page = PAGE_BYTES // (ids.shape[1] * ids.itemsize)
    pages = [ids[at : at + a_page].astype(ids.dtype.newbyteorder("<")).tobytes() for at in range(0, len(ids), a_page)]
    a_file = (256 << 20) // (a_page * ids.shape[1] * ids.itemsize)
    for at in range(0, len(pages), a_file):
        (folder / f"{name}-{at // a_file:05}.pages").write_bytes(b"".join(pages[at : at + a_file]))
    hashes = b"".join(blake3(page).digest() for page in pages)
    return PagePart(windows=len(ids), documents=len(ids), text_bytes=3 * ids.size, hashes=hashes)


def write_data_set(
    folder: Path, *, seq_len: int, windows: int, held_out: int = 4, vocab_size: int = 256, seed: int = 1
) -> tuple[PageIndex, np.ndarray, np.ndarray]:
    """Write a data set of random ids; return its index, and the windows to train on and those held out."""
    folder.mkdir(parents=True, exist_ok=True)
    train, rest = (ids_of(n, seq_len, vocab_size, seed + at) for at, n in enumerate((windows, held_out)))
    index = PageIndex(
        seq_len=seq_len,
        vocab_size=vocab_size,
        dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
        tokenizer="bytes",
        validation_share=0.05,
        train=write_part(folder, "train", train),
        held_out=write_part(folder, "held-out", rest),
    )
    (folder / "index.msgpack").write_bytes(msgspec.msgpack.encode(index))
    return index, train, rest
