"""Data sets built in this process, and a second definition of what they hold."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models, pre_tokenizers, trainers

from peer.data.building.gathering import BUCKETS, GatheredText, Gathering
from peer.data.building.packing import Packing, PackingNote
from peer.data.building.plan import BuildPlan
from peer.data.pages.folder import BuiltPages
from peer.data.pages.index import PageIndex
from peer.data.tokenizer import BYTES, load_tokenizer
from peer.worker.building.build import find_text

END = "<|endoftext|>"


def small_tokenizer(folder: Path, special: tuple[str, ...] = (END,)) -> Path:
    """Write a byte-level BPE of 300 ids, learned from one sentence."""
    made = HubTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    made.train_from_iterator(["the old barn and the new barn are raised by the whole town\n" * 20], trainer)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def random_documents(count: int, seed: int = 1) -> list[bytes]:
    """Return texts of words, letters of several alphabets and empty lines, none empty."""
    rng = np.random.default_rng(seed)
    words = ["the", "barn", "and", "raised", " ", "\n", "\n\n", "é", "日本", "🌾", "x" * 40, "town", "\r\n", "\u2028"]
    return ["".join(rng.choice(words, rng.integers(1, 60))).encode() + b"%d" % at for at in range(count)]


def plan_of(roots: list[Path], tokenizer: str = BYTES, **options: object) -> BuildPlan:
    """Return a plan of small windows for files and folders."""
    name = BYTES if tokenizer == BYTES else blake3(Path(tokenizer).read_bytes()).hexdigest()
    defaults = {"seq_len": 31, "validation_share": 0.2, "buckets": 4, "flush_bytes": 1 << 12}
    return BuildPlan(files=find_text(roots).files, tokenizer=name, **{**defaults, **options})  # type: ignore[arg-type]


def gathered(plan: BuildPlan, folder: Path, tokenizer: str = BYTES, **options: object) -> GatheredText:
    """Run the first pass."""
    folder.mkdir(parents=True, exist_ok=True)
    return Gathering(plan, folder, load_tokenizer(tokenizer), **options).run()  # type: ignore[arg-type]


def packing(plan: BuildPlan, folder: Path, found: GatheredText) -> Packing:
    """Return the second pass, which has not begun."""
    out = folder / "out"
    out.mkdir(parents=True, exist_ok=True)
    note = PackingNote(plan=plan.digest, gathered=msgspec.structs.replace(found))
    return Packing(plan, folder / BUCKETS, out, folder / "note", note)


def built(roots: list[Path], folder: Path, tokenizer: str = BYTES, **options: object) -> PageIndex:
    """Run both passes; the pages are in `folder`/out."""
    plan = plan_of(roots, tokenizer, **options)
    return packing(plan, folder, gathered(plan, folder, tokenizer)).run()


def windows_of(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the windows to train on and those held out, read by the format's definition."""
    index = BuiltPages.open(folder).index
    parts = []
    for name in ("train", "held-out"):
        data = b"".join(path.read_bytes() for path in sorted(folder.glob(f"{name}-*.pages")))
        parts.append(np.frombuffer(data, f"<u{np.dtype(index.dtype).itemsize}").reshape(-1, index.seq_len + 1).tolist())
    return parts[0], parts[1]


def defined(
    documents: list[bytes], ids: list[list[int]], seq_len: int, share: Fraction, seed: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the windows that documents with these ids make, by the definition and without floats."""
    context = "barnraise data set, order of documents, 1"
    key = blake3(struct.pack("<Q", seed), derive_key_context=context).digest()
    order = sorted((blake3(text, key=key).digest(), of) for text, of in zip(documents, ids, strict=True))
    held_out, train = list[int](), list[int]()
    for hashed, of in order:
        is_held_out = int.from_bytes(hashed[:8], "big") * share.denominator < share.numerator << 64
        (held_out if is_held_out or len(held_out) < seq_len + 1 else train).extend(of)
    size = seq_len + 1
    return tuple([part[at : at + size] for at in range(0, len(part) - size + 1, size)] for part in (train, held_out))  # type: ignore[return-value]
