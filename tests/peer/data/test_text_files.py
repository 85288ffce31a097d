"""What a folder of a user's may hold: large files, pipes, other encodings, names that are no text."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.config import DataConfig
from peer.data import text_files
from peer.data.folder_files import TextSource
from peer.data.packed_files import NoText
from peer.data.text_corpus import check_source, has_text, load_corpus, within_memory
from peer.data.text_files import Texts, read_texts
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError

LINES = "".join(f"line {number}: caf\u00e9\n" for number in range(2000))


def _read(root: Path, max_bytes: int = 1 << 30) -> Texts:
    suffixes = frozenset({".txt", ".jsonl"})
    return read_texts(TextSource(root, suffixes, frozenset({"__pycache__"}), is_users=True), max_bytes)


def _only(root: Path, max_bytes: int = 1 << 30) -> str:
    (file,) = _read(root, max_bytes).files
    return file.text.decode()


@pytest.mark.parametrize("limit", [1, 5, 1000, 20_000])
def test_of_a_large_file_the_first_bytes_are_read_up_to_a_line(tmp_path: Path, limit: int) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / "b.txt").write_text("another\n")
    texts = _read(tmp_path, limit)
    text = texts.files[0].text.decode()
    assert LINES.startswith(text) and limit - 20 < len(text.encode()) <= limit and texts.truncated
    assert text.endswith("\n") == (limit >= 1000)
    assert texts.skipped == {"past the limit": 1}


def test_a_file_is_read_in_pieces_and_not_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text(LINES)
    os.truncate(path, 1 << 42)  # 4 TiB, of which the disk has the first lines
    size = len(LINES.encode())
    assert _only(tmp_path, size) == LINES
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 7)  # pieces that cut characters
    os.truncate(path, size)
    assert _only(tmp_path) == LINES and _only(tmp_path, size) == LINES


def test_a_folder_within_the_limit_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("two\n")
    texts = _read(tmp_path, 8)
    assert [bytes(file.text) for file in texts.files] == [b"one\n", b"two\n"] and not texts.truncated
    assert texts.skipped_text() == "nothing"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_text_is_decoded_by_its_mark(
    tmp_path: Path, encoding: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", chunk)
    text = LINES[:500] + "\U0001f600\n"
    (tmp_path / "a.txt").write_text(text, encoding=encoding)
    assert _only(tmp_path) == text
    (tmp_path / "a.txt").write_bytes(b"\xfe\xff" + text.encode("utf-16-be"))
    assert _only(tmp_path) == text


def test_other_bytes_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 and \xc3")
    assert _only(tmp_path) == "caf\ufffd and \ufffd"


def test_what_is_no_text_is_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "late.txt").write_bytes(b"x" * (3 << 20) + b"\0")
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "photo.jpg").write_bytes(b"")
    (tmp_path / "README").write_text("no suffix")
    (tmp_path / os.fsdecode(b"odd.\xff\n")).write_text("")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "a.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "s.txt"))
        texts = _read(tmp_path)
    assert [file.key for file in texts.files] == [b"a.txt"]
    assert texts.skipped == Counter(
        {
            "binary": 1,
            "empty": 1,
            ".jpg": 1,
            "without a suffix": 2,
            "not regular": 3,
            "unreadable": 1,
            "under a second name": 1,
        }
    )
    assert texts.skipped_text().startswith("3 not regular, 2 without a suffix, ") and "1 others" in texts.skipped_text()


def test_a_pipe_that_took_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(NoText, match="not regular"):
        text_files.TextReader(100, b"\n\n", "text").read(tmp_path / "a.txt")


def test_names_need_not_be_utf8(tmp_path: Path) -> None:
    name = b"caf\xe9.txt"
    (tmp_path / os.fsdecode(name)).write_text(LINES)
    assert [file.key for file in _read(tmp_path).files] == [name]
    config = DataConfig(source="folder", seq_len=8)
    assert has_text(config, str(tmp_path))
    assert load_corpus(config, ByteTokenizer(), str(tmp_path)).windows > 100
    with pytest.raises(ConfigError, match="is not UTF-8: rename it"):
        check_source(config, os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=20), chunk=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_jsonl_file_is_the_texts_of_its_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk: int
) -> None:
    root = tmp_path_factory.mktemp("jsonl")
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts]
    bad = ["{", "[]", '{"text": 3}', '{"other": "x"}', "[" * 5000]
    (root / "a.JSONL").write_text("\n".join([*bad, *lines, "", "  "]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(text_files, "_CHUNK_BYTES", chunk)
        read = _read(root)
    wanted = "\n\n".join(text for text in texts if text)
    assert [file.text.decode() for file in read.files] == ([wanted] if wanted else [])
    assert read.skipped["lines of .jsonl without a text"] == len(bad)


def test_a_line_of_jsonl_that_the_limit_cuts_is_left_out(tmp_path: Path) -> None:
    line = '{"text": "some words"}\n'
    (tmp_path / "a.jsonl").write_text(line * 3)
    texts = _read(tmp_path, len(line) * 2 + 5)
    assert texts.files[0].text == b"some words\n\nsome words" and texts.truncated


def test_the_account_tells_what_was_read_and_what_was_not(tmp_path: Path) -> None:
    config = DataConfig(source="folder", seq_len=8)
    for number in range(3):
        (tmp_path / f"{number}.log").write_text(LINES)
    with pytest.raises(ConfigError, match=r"too little text.*0 files read.*skipped 3 \.log; suffixes read \.c \.csv"):
        load_corpus(config, ByteTokenizer(), str(tmp_path))
    (tmp_path / "a.txt").write_text(LINES)
    corpus = load_corpus(config, ByteTokenizer(), str(tmp_path))
    facts = corpus.facts
    assert (facts.files, facts.train_tokens, facts.held_out_tokens) == (1, len(corpus.train), len(corpus.held_out))
    assert facts.account.startswith("1 file read, ") and "skipped 3 .log; suffixes read" in facts.account


def test_a_machine_of_little_memory_reads_the_first_of_what_others_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    config = DataConfig(source="folder", seq_len=8)
    assert within_memory(config, 64e9) == config
    small = within_memory(config, 16 * 10_000)
    assert small.max_bytes == 10_000 and small.seq_len == 8
    facts = load_corpus(small, ByteTokenizer(), str(tmp_path)).facts
    assert facts.truncated and facts.train_bytes + facts.held_out_bytes <= 10_002
    assert "skipped nothing; no more than the first 10.0 kB are read" in facts.account
