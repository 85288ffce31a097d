"""The held-out part: blocks by hashes, the same whatever else is in the folder, and near the wanted share."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.config import DataConfig
from peer.data.held_out import BLOCK_BYTES, blocks_of, split
from peer.data.text_corpus import load_corpus
from peer.data.text_files import EMPTY_LINE, FileText
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError

LARGE_BYTES = 10_000_000
WINDOW_BYTES = 8 * 129
LINES = b"".join(b"%07d\n" % number for number in range(1 << 18))

names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6)
shares = st.floats(0.01, 0.5)


@st.composite
def folders(draw: st.DrawFn, least_bytes: int = 0) -> list[FileText]:
    """Files of distinct names and of any sizes, `least_bytes` at least in all; each line says where it stands. A file
    may be one line."""
    files, total = list[FileText](), 0
    for name in draw(st.lists(names, min_size=1, max_size=12, unique=True)):
        size = draw(st.one_of(st.integers(1, 2_000), st.integers(1, 200_000), st.integers(1, len(LINES))))
        text = LINES[:size] if draw(st.integers(0, 4)) else LINES[:size].replace(b"\n", b" ")
        files.append(FileText(name.encode(), bytearray(text)))
        total += size
    while total < least_bytes:
        files.append(FileText(b"more%d" % len(files), bytearray(LINES)))
        total += len(LINES)
    return files


@given(files=folders(LARGE_BYTES), share=shares)
@settings(max_examples=25, deadline=None)
def test_the_share_of_a_large_folder_is_near_the_wanted_one(files: list[FileText], share: float) -> None:
    train, held_out = split(files, share, WINDOW_BYTES)
    assert share / 2 <= len(held_out) / len(train + held_out) <= 2 * share


def test_the_share_of_many_files_of_one_block_is_near_the_wanted_one() -> None:
    text = bytearray(b"a line\n" * (BLOCK_BYTES // 7))
    for draw in range(200):
        files = [FileText(b"%d-%d" % (draw, number), text) for number in range(155)]
        train, held_out = split(files, 0.05, WINDOW_BYTES)
        assert 0.025 <= len(held_out) / len(train + held_out) <= 0.1, draw


@given(first=st.integers(0, 10**9), share=st.floats(0.02, 0.5), blocks=st.integers(160, 400))
@settings(max_examples=50, deadline=None)
def test_the_blocks_of_one_large_file_need_no_second_rule(first: int, share: float, blocks: int) -> None:
    file = FileText(b"%d" % first, bytearray(b"%07d\n" % first * (BLOCK_BYTES // 8)) * blocks)
    held = [block for block in blocks_of(file) if block.order < share * 2**64]
    assert share / 2 <= len(held) / blocks <= 2 * share


@given(files=folders(), share=shares)
@settings(max_examples=40, deadline=None)
def test_every_byte_is_in_one_part(files: list[FileText], share: float) -> None:
    train, held_out = split(files, share, WINDOW_BYTES)
    total = sum(len(file.text) for file in files)
    joints = (train + held_out).count(EMPTY_LINE)
    assert len(train) + len(held_out) == total + joints * len(EMPTY_LINE)
    for part in (train, held_out):
        assert len(part) >= min(WINDOW_BYTES, total // 2) * 7 // 8
    for file in files:
        for block in blocks_of(file):
            assert 0 < block.size_bytes <= BLOCK_BYTES
            ends_a_line = file.text[block.stop - 1] == ord("\n") or block.stop == len(file.text)
            assert ends_a_line or b"\n" not in file.text[block.start : block.stop]


@given(files=folders(LARGE_BYTES), more=folders())
@settings(max_examples=15, deadline=None)
def test_a_file_more_moves_no_other_block(files: list[FileText], more: list[FileText]) -> None:
    known = {file.key for file in files}
    grown = files + [file for file in more if file.key not in known]
    before = [block.order for index, file in enumerate(files) for block in blocks_of(file, index)]
    after = [block.order for index, file in enumerate(grown) for block in blocks_of(file, index)]
    assert after[: len(before)] == before

    # and the parts are those hashes: in a folder of many blocks the second rule is not needed
    marked = [FileText(b"m%d" % number, bytearray(b"%05d\n" % number * 900)) for number in range(2_500)]
    _, held_out = split(marked, 0.05, WINDOW_BYTES)
    _, with_more = split(marked + more, 0.05, WINDOW_BYTES)
    held = {line for line in held_out.split(b"\n") if line}
    assert {line for line in with_more.split(b"\n") if len(line) == 5} >= held


def test_characters_of_a_line_longer_than_blocks_stay_whole() -> None:
    file = FileText(b"long", bytearray(("x" + "\u20ac" * 100_000).encode()))
    pieces = [bytes(file.text[block.start : block.stop]).decode() for block in blocks_of(file)]
    assert len(pieces) == 5 and "".join(pieces).encode() == file.text
    for part in split([file], 0.05, WINDOW_BYTES):
        assert "\u20ac" * 10 in part.decode()


def test_a_validation_file_is_not_what_is_trained_on(tmp_path: Path) -> None:
    lines = "".join(f"line {number} of a text\n" for number in range(60_000))
    config = DataConfig(source="folder", seq_len=128)
    for names in (("x-train.txt", "x-valid.txt"), ("x-valid.txt", "x-train.txt")):
        for name, size in zip(names, (922_000, 9_000), strict=True):
            (tmp_path / name).write_text(lines[:size])
        corpus = load_corpus(config, ByteTokenizer(), str(tmp_path))
        assert corpus.facts.train_bytes > 830_000 and 23_000 < corpus.facts.held_out_bytes < 94_000


def test_a_folder_too_small_for_both_parts_is_refused_with_both_sizes(tmp_path: Path) -> None:
    config = DataConfig(source="folder", seq_len=128)
    (tmp_path / "a.txt").write_text("x" * 250)
    with pytest.raises(ConfigError) as refused:
        load_corpus(config, ByteTokenizer(), str(tmp_path))
    assert "125 tokens to train on and 125 held out, where each part needs 129" in str(refused.value)
    assert str(refused.value).endswith(": add text or lower data.seq_len")
    (tmp_path / "a.txt").write_text("x" * 258)  # just enough
    assert load_corpus(config, ByteTokenizer(), str(tmp_path)).windows == 1


def test_a_gap_ends_a_text_and_only_a_gap_does() -> None:
    file = FileText(b"a", bytearray(b"".join(b"%07d\n" % number for number in range(200_000))))
    for part in split([file], 0.1, WINDOW_BYTES):
        texts = [[int(line) for line in text.split()] for text in part.split(b"\n" + EMPTY_LINE)]
        assert len(texts) > 1
        for text in texts:
            assert text == list(range(text[0], text[-1] + 1))
        assert all(later[0] > earlier[-1] + 1 for earlier, later in itertools.pairwise(texts))
