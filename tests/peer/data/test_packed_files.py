"""Compressed text and tables of texts: the same documents as in plain files, and bounded whatever they unpack to."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.config import DataConfig
from peer.data.folder_files import TextSource
from peer.data.packed_files import PARQUET, RATIO, is_whole
from peer.data.text_corpus import has_packed_text, load_corpus, token_cache_bytes
from peer.data.text_files import Texts, read_texts
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError

DOCUMENTS = [f"text {number}: caf\u00e9\n" + "word " * (number % 9) for number in range(300)]
LINES = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in DOCUMENTS).encode()


def zstd(content: bytes) -> bytes:
    found: bytes = importlib.import_module("zstandard").compress(content)
    return found


def table(**columns: list[Any]) -> bytes:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(arrow.table(columns), file, row_group_size=50, compression="zstd")
    return file.getvalue()


def read(root: Path, max_bytes: int = 1 << 30, field: str = "text") -> Texts:
    suffixes = frozenset({".txt", ".jsonl", PARQUET})
    return read_texts(TextSource(root, suffixes, frozenset(), is_users=True, field=field), max_bytes, b"|")


def lines(**columns: list[Any]) -> bytes:
    rows = zip(*columns.values(), strict=True)
    return "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows).encode()


WRITERS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.JSONL.ZST": lambda: zstd(LINES),
    "a.parquet": lambda: table(id=[1] * len(DOCUMENTS), text=DOCUMENTS),
    "a.txt.gz": lambda: gzip.compress("|".join(DOCUMENTS).encode()),
    "a.txt.zst": lambda: zstd("|".join(DOCUMENTS[:100]).encode()) + zstd("|".join(["", *DOCUMENTS[100:]]).encode()),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_all_kinds_hold_the_same_text(tmp_path: Path, name: str, is_folder: bool) -> None:
    (tmp_path / name).write_bytes(WRITERS[name]())
    texts = read(tmp_path if is_folder else tmp_path / name)
    (file,) = texts.files
    assert bytes(file.text).decode() == "|".join(DOCUMENTS) and file.key == name.encode() and not texts.truncated
    assert file.documents == (1 if ".txt" in name else len(DOCUMENTS)) and texts.skipped_text() == "nothing"


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_file_unpacks_to_counts_against_the_limit(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WRITERS[name]())
    texts = read(tmp_path, 2000)
    (file,) = texts.files
    assert "|".join(DOCUMENTS).startswith(bytes(file.text).decode()) and 500 < len(file.text) <= 2000
    assert texts.truncated


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_that_unpacks_to_much_costs_the_limit(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstd
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"line\n" * (20 << 20)))
    texts = read(tmp_path, 1 << 16)
    assert texts.truncated and len(texts.files[0].text) <= 1 << 16


def test_what_is_damaged_or_has_no_text_is_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"no gzip at all")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(LINES)[:200])
    (tmp_path / "c.txt.zst").write_bytes(b"no zstandard at all")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no table PAR1")
    (tmp_path / "e.parquet").write_bytes(table(text=[1, 2]))
    (tmp_path / "f.parquet").write_bytes(table(content=["one"]))
    (tmp_path / "g.parquet").write_bytes(table(text=["one", None, "two"]))
    (tmp_path / "h.bin.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "i.parquet.gz").write_bytes(gzip.compress(table(text=["one"])))
    texts = read(tmp_path)
    assert [(file.key, bytes(file.text)) for file in texts.files] == [(b"g.parquet", b"one|two")]
    assert texts.skipped == Counter(
        {
            "damaged .gz": 2,
            "damaged .zst": 1,
            "damaged .parquet": 1,
            ".parquet without a column text": 2,
            "lines of .parquet without a text": 1,
            ".gz": 2,
        }
    )


def test_a_zstandard_file_that_ends_within_a_frame_is_damaged(tmp_path: Path) -> None:
    """Wherever it was cut, except between two frames: what is there is then a whole file."""
    zstandard = importlib.import_module("zstandard")
    first = zstandard.ZstdCompressor(write_checksum=True).compress(b"first line\n" * 9)
    streamed = zstandard.ZstdCompressor(level=1).compressobj()  # no size in the header, and a block for each flush
    second = b"".join(
        [streamed.compress(os.urandom(999)), streamed.flush(1), streamed.compress(b"a" * 5000), streamed.flush()]
    )
    skippable = b"\x5a\x2a\x4d\x18\x03\x00\x00\x00any"
    whole = first + skippable + second
    whole_at = {len(first), len(first + skippable), len(whole)}
    assert {size for size in range(1, len(whole) + 1) if is_whole(io.BytesIO(whole[:size]))} == whole_at
    (tmp_path / "a.txt.zst").write_bytes((first * 2)[:-1])
    (tmp_path / "b.txt.zst").write_bytes(zstd(LINES)[:-1])
    (tmp_path / "c.txt.zst").write_bytes(first + skippable)
    texts = read(tmp_path)
    assert [file.key for file in texts.files] == [b"c.txt.zst"] and texts.skipped == Counter({"damaged .zst": 2})


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_a_missing_library_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    (tmp_path / name).write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"files need {package}: pip install "):
        load_corpus(DataConfig(source="folder", seq_len=8), ByteTokenizer(), str(tmp_path))


def test_the_account_counts_texts_and_the_disk_what_they_unpack_to(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(packed := gzip.compress(LINES))
    config = DataConfig(source="folder", seq_len=8)
    assert has_packed_text(str(tmp_path)) and not has_packed_text("")
    assert token_cache_bytes(config, str(tmp_path)) == len(packed) * RATIO * 2
    facts = load_corpus(config, ByteTokenizer(), str(tmp_path)).facts
    assert facts.documents == len(DOCUMENTS) and facts.account.startswith("1 file (300 texts) read")


@pytest.mark.parametrize(("name", "made"), [("a.jsonl", lines), ("a.parquet", table)])
@pytest.mark.parametrize("field", ["content", "a.b", "t\u00e9xte", "with space"])
def test_the_user_names_the_field_that_holds_the_text(
    tmp_path: Path, name: str, made: Callable[..., bytes], field: str
) -> None:
    nested = [{"b": "not this"}] * len(DOCUMENTS)
    content = made(**{"text": ["other"] * len(DOCUMENTS), "a": nested, field: DOCUMENTS})
    (tmp_path / name).write_bytes(content)
    (file,) = read(tmp_path, field=field).files
    assert bytes(file.text).decode() == "|".join(DOCUMENTS) and file.documents == len(DOCUMENTS)
    corpus = load_corpus(DataConfig(source="folder", seq_len=8), ByteTokenizer(), str(tmp_path), text_field=field)
    assert corpus.facts.documents == len(DOCUMENTS)


@pytest.mark.parametrize(("name", "made"), [("a.jsonl", lines), ("a.parquet", table)])
@pytest.mark.parametrize("field", ["", "body", "number"])
def test_a_field_that_is_not_there_is_an_error_that_names_those_that_are(
    tmp_path: Path, name: str, made: Callable[..., bytes], field: str
) -> None:
    content = made(number=[1] * 9, title=["a title"] * 9, content=["text " * 99] * 9, tags=[["a"]] * 9)
    (tmp_path / name).write_bytes(content)
    if field:  # else the other text is enough
        (tmp_path / "b.txt").write_text("line\n" * 99)
    with pytest.raises(ConfigError) as told:
        load_corpus(DataConfig(source="folder", seq_len=8), ByteTokenizer(), str(tmp_path), text_field=field)
    assert f"has text in a field {field or 'text'!r} (skipped" in str(told.value)
    assert str(told.value).endswith("): give --text-field one of 'content', 'title'")


def test_a_folder_needs_one_file_with_the_field(tmp_path: Path) -> None:
    config = DataConfig(source="folder", seq_len=8)
    (tmp_path / "a.txt").write_text("line\n" * 99)
    with pytest.raises(ConfigError, match=r"in a field 'body' \(skipped nothing\): leave --text-field out"):
        load_corpus(config, ByteTokenizer(), str(tmp_path), text_field="body")
    (tmp_path / "b.jsonl").write_bytes(lines(content=["text " * 99] * 9))
    assert load_corpus(config, ByteTokenizer(), str(tmp_path)).facts.files == 1
    (tmp_path / "c.jsonl").write_bytes(lines(body=["text " * 99] * 9))
    facts = load_corpus(config, ByteTokenizer(), str(tmp_path), text_field="body").facts
    assert (facts.files, facts.documents) == (2, 10) and "9 lines of .jsonl without a text" in facts.account


def test_names_of_fields_are_shown_cut_and_without_controls(tmp_path: Path) -> None:
    names = {f"{number}\x1b[2J{'x' * 9999}": ["text"] for number in range(2000)}
    (tmp_path / "a.jsonl").write_bytes(lines(**names))
    with pytest.raises(ConfigError) as told:
        load_corpus(DataConfig(source="folder", seq_len=8), ByteTokenizer(), str(tmp_path))
    assert len(str(told.value)) < 500 + len(str(tmp_path)) and str(told.value).isprintable()
