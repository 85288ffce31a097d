"""The sample stream: a true permutation, a fair split, disjoint ranges on disjoint text."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.config import DataConfig
from peer.corpus_facts import CorpusFacts
from peer.data.corpus import sample_numbers
from peer.data.permute import permute
from peer.data.text_corpus import TextCorpus, has_text, load_corpus
from peer.data.tokenizer import ByteTokenizer, Ids
from peer.errors import ConfigError


@given(size=st.integers(1, 700), key=st.text(max_size=8))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permute_shuffles_and_depends_on_the_key() -> None:
    one, two = ([permute(index, 1000, key) for index in range(1000)] for key in ("a", "b"))
    assert one != two
    fixed = sum(index == image for index, image in enumerate(one))
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(one))
    assert fixed < 10 and neighbours < 15  # a random permutation has 1 and 2 on average


def _folder(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _numbered(root: Path, windows: int, seq_len: int) -> TextCorpus:
    """A corpus whose training window k starts with the byte k: every window tells which one it is."""
    text = b"".join(bytes([k]) + bytes([255]) * (seq_len - 1) for k in range(windows)) + b"\xff"
    return TextCorpus(
        train=ByteTokenizer().encode_file(text),
        held_out=ByteTokenizer().encode_file(text),
        digest=b"",
        seq_len=seq_len,
        facts=CorpusFacts(
            files=1,
            train_bytes=len(text),
            held_out_bytes=len(text),
            train_tokens=len(text),
            held_out_tokens=len(text),
            truncated=False,
            account="",
        ),
    )


@given(
    windows=st.integers(1, 200), seq_len=st.integers(1, 9), seed=st.integers(0, 3), cuts=st.sets(st.integers(0, 399))
)
@settings(max_examples=50, deadline=None)
def test_ranges_that_partition_the_numbers_partition_each_epoch(
    windows: int, seq_len: int, seed: int, cuts: set[int]
) -> None:
    corpus = _numbered(Path(), windows, seq_len)
    assert corpus.windows == windows
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < 2 * windows), 2 * windows]
    peers = [list(sample_numbers([span])) for span in itertools.pairwise(edges)]
    numbers = [number for peer in peers for number in peer]
    seen = corpus.batch(numbers, seed)[:, 0].tolist()
    assert sorted(seen[:windows]) == sorted(seen[windows:]) == list(range(windows))


def test_a_batch_holds_the_next_token_too(tmp_path: Path) -> None:
    corpus = _numbered(tmp_path, windows=3, seq_len=4)
    batch = corpus.batch([0, 1, 2], seed=0)
    assert batch.shape == (3, 5)
    assert sorted(row[4] for row in batch.tolist()) == [1, 2, 255]


def test_epochs_are_shuffled_apart_and_numbers_do_not_end(tmp_path: Path) -> None:
    corpus = _numbered(tmp_path, windows=50, seq_len=2)
    first, second = (corpus.batch(list(range(at, at + 50)), seed=1)[:, 0].tolist() for at in (0, 50))
    assert first != second
    assert corpus.batch([10**15], seed=1).shape == (1, 3)


def test_the_split_of_small_files_follows_names_alone_and_is_disjoint(tmp_path: Path) -> None:
    files = {f"sub{k % 3}/file{k}.txt": f"text of file {k}. " * 5 for k in range(200)}
    config = DataConfig(source="folder", seq_len=16, validation_share=0.2)
    corpus = load_corpus(config, ByteTokenizer(), str(_folder(tmp_path / "a", files)))
    train, held_out = bytes(corpus.train.tolist()).decode(), bytes(corpus.held_out.tolist()).decode()
    for text in files.values():
        assert (text in train) != (text in held_out)
    assert 0.1 < len(held_out) / len(train + held_out) < 0.3
    assert corpus.bytes_per_token == 1.0

    # moved elsewhere, same corpus; one file more, and no other file changes sides
    moved = str(_folder(tmp_path / "b", files))
    assert load_corpus(config, ByteTokenizer(), moved).digest == corpus.digest
    _folder(tmp_path / "b", {"new.txt": "another text, quite long enough"})
    grown = load_corpus(config, ByteTokenizer(), moved)
    assert grown.digest != corpus.digest
    assert all((text in bytes(grown.held_out.tolist()).decode()) == (text in held_out) for text in files.values())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_files_fill_both_parts(tmp_path: Path, count: int) -> None:
    _folder(tmp_path, {f"{k}.txt": str(k) * 1000 for k in range(count)})
    corpus = load_corpus(DataConfig(source="folder", seq_len=8), ByteTokenizer(), str(tmp_path))
    assert corpus.windows > 3 and len(corpus.held_out) > 8


def test_the_size_limit_keeps_the_first_files(tmp_path: Path) -> None:
    _folder(tmp_path, {f"{k:02}.txt": str(k % 10) * 1000 for k in range(20)})
    config = DataConfig(source="folder", seq_len=8, max_bytes=5500)
    corpus = load_corpus(config, ByteTokenizer(), str(tmp_path))
    assert corpus.facts.truncated
    assert set(corpus.train.tolist()) | set(corpus.held_out.tolist()) == {*b"012345\n"}


def test_ids_of_a_slow_tokenizer_are_cached(tmp_path: Path) -> None:
    class Slow(ByteTokenizer):
        fingerprint: bytes | None = b"slow"
        calls = 0

        def encode_file(self, data: bytes) -> Ids:
            self.calls += 1
            return super().encode_file(data)

    _folder(tmp_path / "text", {f"{k}.txt": str(k) * 100 for k in range(9)})
    config, tokenizer, text = DataConfig(source="folder", seq_len=8), Slow(), str(tmp_path / "text")
    first = load_corpus(config, tokenizer, text, cache=tmp_path)
    again = load_corpus(config, tokenizer, text, cache=tmp_path)
    assert tokenizer.calls == 2 and again.train.tolist() == first.train.tolist()
    assert again.batch([3], seed=0).tolist() == first.batch([3], seed=0).tolist()
    tokenizer.fingerprint = b"another"
    load_corpus(config, tokenizer, text, cache=tmp_path)
    (tmp_path / "text" / "0.txt").write_text("changed" * 20)
    load_corpus(config, tokenizer, text, cache=tmp_path)
    assert tokenizer.calls > 4  # neither another tokenizer nor another text is taken from the cache


def test_unusable_text_is_refused(tmp_path: Path) -> None:
    config = DataConfig(source="folder", seq_len=8)
    with pytest.raises(ConfigError, match="does not exist: name a file or folder of text"):
        load_corpus(config, ByteTokenizer(), str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="too little text"):
        load_corpus(config, ByteTokenizer(), str(tmp_path))
    with pytest.raises(ConfigError, match="with --data"):
        load_corpus(config, ByteTokenizer())


def test_has_text(tmp_path: Path) -> None:
    config, folder = DataConfig(seq_len=8, source="folder"), str(tmp_path / "deep")
    assert not has_text(config, folder), "no folder"
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "photo.jpg").write_bytes(b"no text")
    assert not has_text(config, folder) and not has_text(config)
    (tmp_path / "deep" / "deeper" / "scenario.txt").write_text("once")
    assert has_text(config, folder)
    assert has_text(DataConfig(seq_len=8, source="stdlib"))


def test_the_standard_library_is_a_corpus() -> None:
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    traced = sys.gettrace()
    sys.settrace(count)
    try:
        corpus = load_corpus(DataConfig(seq_len=128), ByteTokenizer())
    finally:
        sys.settrace(traced)
    assert lines < len(corpus.train) // 2, "it loops over its bytes"
    assert corpus.windows > 10_000 and not corpus.facts.truncated
    assert b"import os" in bytes(corpus.train.tolist())
    batches = list(corpus.held_out_batches(batch_size=8, max_batches=3))
    assert [tuple(batch.shape) for batch in batches] == [(8, 129)] * 3
    assert len({tuple(row) for batch in batches for row in batch.tolist()}) == 24
