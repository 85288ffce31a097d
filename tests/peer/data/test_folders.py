"""Folders of text as people have them: which texts are read, and the account of all else."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peer.config import DataConfig
from peer.data.text_corpus import _source, has_text, load_corpus, token_cache_bytes
from peer.data.text_files import Texts, read_texts
from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError

ROWS = [{"id": 1, "text": "one text"}, {"id": 2, "text": "two \u00e9 texts"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
READ = ["one text|two \u00e9 texts"]
OTHER = {"z.txt": "plain text\n"}
STRINGS = ["string", "large_string", "string_view", "binary", "large_binary", "binary_view"]
Folder = tuple[dict[str, str | bytes], list[str], str]
CONFIG = DataConfig(seq_len=1, source="folder")


def arrow_types() -> dict[str, Any]:
    arrow = importlib.import_module("pyarrow")
    plain = {name: getattr(arrow, name)() for name in STRINGS}
    dictionaries = {
        f"dictionary of {name}": arrow.dictionary(index, plain[name])
        for name, index in (("string", arrow.int8()), ("large_string", arrow.int32()), ("binary", arrow.uint16()))
    }
    json_type = {"arrow.json": arrow.json_()} if hasattr(arrow, "json_") else {}
    return {**plain, **dictionaries, **json_type}


def column(kind: Any, texts: list[str | None]) -> Any:
    arrow = importlib.import_module("pyarrow")
    if isinstance(kind, arrow.BaseExtensionType):
        return arrow.ExtensionArray.from_storage(kind, arrow.array(texts, kind.storage_type))
    if arrow.types.is_dictionary(kind):
        return arrow.array(texts, type=kind.value_type).dictionary_encode().cast(kind)
    return arrow.array(texts, type=kind)  # older releases cast no string to a view


def parquet(**columns: Any) -> bytes:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(arrow.table(columns), file, row_group_size=2)
    return file.getvalue()


def build(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def read(root: Path, field: str = "") -> tuple[list[str], Texts]:
    texts = read_texts(_source(str(root), field), 1 << 30, b"|")
    return [bytes(file.text).decode() for file in texts.files], texts


NO_TEXT = "without text in field text"
FOLDERS: dict[str, Folder] = {
    "plain text": (
        {"a.txt": "a\n", "b.md": "b\n", "c.py": "c\n", "d.csv": 'id,text\n1,"d"\n', "e.html": "<p>e</p>", "f.log": "f"},
        ["a\n", "b\n", "c\n", 'id,text\n1,"d"\n', "<p>e</p>"],
        "1 .log; suffixes read .c .csv .h .html .json .jsonl .md .ndjson .parquet .py .rs .rst .tex .txt .xml, and"
        " these with .gz or .zst",
    ),
    "JSON lines, whatever the suffix": (
        {"a.json": LINES, "b.json.gz": gzip.compress(LINES.encode()), "c.jsonl": LINES, "d.NDJSON": LINES},
        READ * 4,
        "nothing",
    ),
    "JSON lines with a mark, line ends of Windows and blank lines": (
        {"a.json": LINES.replace("\n", "\r\n\r\n").rstrip().encode("utf-8-sig"), "b.jsonl": LINES.encode("utf-16")},
        READ * 2,
        "nothing",
    ),
    "one array of objects": (
        {
            "a.json": json.dumps(ROWS),
            "b.json": json.dumps(ROWS, indent=2),
            "c.jsonl": json.dumps(ROWS, indent=0),
            "d.json": "[\n" + LINES.strip().replace("\n", ",\n") + "\n]",
            "e.json": json.dumps(ROWS) * 2,
        },
        [*READ * 4, "|".join(READ * 2)],
        "nothing",
    ),
    "objects over several lines, or without lines": (
        {
            "a.json": json.dumps(ROWS[0], indent=2),
            "b.jsonl": "\n".join(json.dumps(row, indent=2) for row in ROWS),
            "c.json": LINES.replace("\n", ""),
            "d.json": json.dumps(ROWS[0]),
        },
        ["one text", *READ * 2, "one text"],
        "nothing",
    ),
    "an array of much else": (
        {
            "a.json": json.dumps(
                ["text", "a ] [", ["text"], 3, None, -1.5, {"text": 'x [ " ] }'}, {"text": 1}, {"b": {}}]
            )
        },
        ['x [ " ] }'],
        "8 entries of .json without a text",
    ),
    "numbers that are none": (
        {
            "a.jsonl": '{"x":NaN,"text":"NaN, \\"Infinity"}\n{"text":"b","x":[-Infinity,Infinity]}\n{"text":NaN}\n',
            "b.json": '[{"x": NaN, "text": "c"}, {"text": "d", "x": -Infinity}]',
        },
        ['NaN, "Infinity|b', "c|d"],
        "1 line of .jsonl without a text",
    ),
    "odd lines": (
        {
            "a.jsonl": '{"text":"no","text":"first"}\n{"text":3,"text":"second"}\n{"n":'
            + "9" * 5000
            + ',"text":"third"}\n'
            '{"text":null}\n{"text":["list"]}\n{"text":""}\n{"text":"deep","a":' + "[" * 3000 + "]" * 3000 + "}\n"
            '{"text":"cut'
        },
        ["first|second|third"],
        "4 lines of .jsonl without a text, 1 line of .jsonl with an empty text",
    ),
    "a first line that is cut": (
        {"a.jsonl": '{"text": "cut\n' + LINES, "b.json": '{"text": "cut",\n' + LINES},
        READ * 2,
        "1 line of .jsonl without a text, 1 line of .json without a text",
    ),
    "JSON of other forms": (
        {
            **OTHER,
            "config.json": json.dumps({"name": "x", "n": 1}, indent=2),
            "lock.json": '{"text": ["a", "b"]}',
            "data.json": '{"data": [\n' + LINES.strip().replace("\n", ",\n") + "\n]}",
            "columns.json": '{"text": {"0": "a"}}',
            "numbers.json": "[1, 2]",
            "notes.json": "prose\nof lines\n",
            "null.json": "null",
            "none.json": "",
            "chat.json": json.dumps([{"conversations": [{"from": "human", "value": "hello"}]}] * 2),
        },
        ["plain text\n"],
        f"4 .json of one object {NO_TEXT}, 3 .json without a JSON object, 1 .json {NO_TEXT}, 1 empty,"
        " 2 entries of .json without a text",
    ),
    "hidden files and folders": (
        {
            **OTHER,
            ".git/objects/aa/b": "",
            ".ipynb_checkpoints/a-checkpoint.txt": "x",
            "deep/.cache/a.json": LINES,
            "__pycache__/a.txt": "",
            "node_modules/x/index.json": "{}",
            "__MACOSX/._z.txt": "\0",
            "._z.txt": "\0",
            ".DS_Store": "\0",
            "deep/.hidden.txt": "x",
            "z.txt~": "plain",
            ".z.txt.swp": "\0",
        },
        ["plain text\n"],
        "4 hidden, 3 in hidden folders, 3 in folders of tools, 1 .txt~; suffixes read .c .csv .h .html .json .jsonl .md"
        " .ndjson .parquet .py .rs .rst .tex .txt .xml, and these with .gz or .zst",
    ),
    "other encodings": (
        {
            "a.txt": "caf\u00e9".encode("latin-1"),
            "b.txt": "caf\u00e9",
            "c.jsonl": b'{"text": "caf\xe9"}\n{"text": "d"}',
            "d.jsonl": '{"text": "x\\ud800y \\ud83d\\ude00 \\\\ud800"}\n',
            "e.txt": "two\ufffd",
        },
        ["caf\ufffd", "caf\u00e9", "caf\ufffd|d", "x\ufffdy \U0001f600 \\ud800", "two\ufffd"],
        "nothing; 3 files with invalid characters, read as U+FFFD",
    ),
}
TABLES: dict[str, Callable[[], Folder]] = {  # each loads pyarrow
    "a column of each type of strings": lambda: (
        {
            f"{number}.parquet": parquet(id=list(range(4)), text=column(kind, ["a", None, "caf\u00e9", "a"]))
            for number, kind in enumerate(arrow_types().values())
        },
        ["a|caf\u00e9|a"] * len(arrow_types()),
        f"{len(arrow_types())} lines of .parquet without a text",
    ),
    "tables without such a column": lambda: (
        {
            **OTHER,
            "a.parquet": parquet(text=[1, 2]),
            "b.parquet": parquet(text=[["a"]]),
            "c.parquet": parquet(body=["a"]),
            "d.parquet": parquet(text=[{"text": "a"}]),
            "e.parquet": parquet(text=column(arrow_types()["string"], [])),
            "f.parquet": parquet(text=[b"\xff\xd8", b"\0", b"utf-8", b""]),
            "g.arrow": "ARROW1",
        },
        ["utf-8", "plain text\n"],
        "4 .parquet without a column text, 1 .arrow, 1 empty, 2 lines of .parquet without a text, 1 line of .parquet"
        " with an empty text; suffixes read .c .csv .h .html .json .jsonl .md .ndjson .parquet .py .rs .rst .tex .txt"
        " .xml, and these with .gz or .zst",
    ),
}


@pytest.mark.parametrize("name", [*FOLDERS, *TABLES])
def test_a_folder_is_read_and_accounted_for(tmp_path: Path, name: str) -> None:
    files, wanted, account = TABLES[name]() if name in TABLES else FOLDERS[name]
    texts, _ = read(build(tmp_path, files))
    assert texts == wanted
    told = load_corpus(CONFIG, ByteTokenizer(), str(tmp_path)).facts.account
    assert told.partition("; skipped ")[2] == account


NO_FIELD = "no JSON or .parquet file in {!r} has text in a field 'text' (skipped {}): {}"
CONVERT = "write each text on a line of its own as an object with the field 'text', or name plain text .txt"


@pytest.mark.parametrize(
    ("content", "kind", "remedy"),
    [
        ({"version": "1", "data": ROWS}, f"1 .json of one object {NO_TEXT}", CONVERT),
        ({"id": "a", "body": "a text " * 9}, f"1 .json of one object {NO_TEXT}", "give --text-field one of 'body'"),
        ([{"id": 1, "a": "x", "b": ""}], f"1 .json of one object {NO_TEXT}", CONVERT),
        ([{"n": 1, "a": "x", "b": "y"}] * 2, f"1 .json {NO_TEXT}, 2 entries of .json without a text",
         "give --text-field one of 'a', 'b'"),
        (["text"], "1 .json without a JSON object", CONVERT),
    ],
)  # fmt: skip
def test_data_of_another_form_alone_is_an_error_that_names_it(
    tmp_path: Path, content: object, kind: str, remedy: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content, indent=1))
    with pytest.raises(ConfigError) as told:
        load_corpus(CONFIG, ByteTokenizer(), str(tmp_path))
    assert str(told.value) == NO_FIELD.format(str(tmp_path), kind, remedy)


def test_damaged_json_is_not_said_to_lack_a_field(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(LINES.encode())[:-9])
    with pytest.raises(ConfigError, match=r"too little text.*skipped 1 damaged \.gz\)"):
        load_corpus(CONFIG, ByteTokenizer(), str(tmp_path))


@pytest.mark.parametrize("name", [".hidden", ".cache/x", "node_modules", ".a.txt"])
def test_a_hidden_folder_or_file_that_the_user_names_is_read(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    build(tmp_path, {name if name.endswith(".txt") else f"{name}/a.txt": "text\n"})
    assert read(root)[0] == ["text\n"] and has_text(CONFIG, str(root)) and token_cache_bytes(CONFIG, str(root)) == 10
    assert not has_text(CONFIG, str(tmp_path)) and token_cache_bytes(CONFIG, str(tmp_path)) == 0


def test_links_are_followed_to_files_and_each_file_is_read_once(tmp_path: Path) -> None:
    """As in Hugging Face's cache, where snapshots link to blobs."""
    root = build(tmp_path / ".cache" / "datasets--x", {"blobs/aa": LINES, "blobs/bb": "b\n", "refs/main": "sha"})
    for name, blob in (("1/a.json", "aa"), ("1/b.txt", "bb"), ("2/a.json", "aa")):
        (root / "snapshots" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "snapshots" / name).symlink_to(f"../../blobs/{blob}")
    os.link(root / "blobs" / "bb", root / "c.txt")
    (root / "circle.txt").symlink_to("circle.txt")
    (root / "up").symlink_to(".", target_is_directory=True)
    (root / ".up").symlink_to(".", target_is_directory=True)
    texts, found = read(root)
    assert sorted(texts) == sorted(["b\n", *READ])
    assert found.skipped_text() == "3 without a suffix, 2 links to folders, 2 under a second name, 1 unreadable"


def test_a_folder_that_cannot_be_listed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, {"a.txt": "a\n", "closed/b.txt": "b\n", ".closed/c.txt": "c\n"})
    scandir = os.scandir

    def guarded(path: Any) -> Any:
        if os.fspath(path).endswith("closed"):
            raise PermissionError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    texts, found = read(tmp_path)
    assert texts == ["a\n"] and found.skipped_text() == "2 unreadable folders"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_first_document_beyond_the_limit_is_past_it(tmp_path: Path, name: str) -> None:
    whole = [{"text": "x" * 500}]
    contents: dict[str, str | bytes] = {"a.jsonl": LINES * 9, "a.json": json.dumps(whole)}
    content = contents.get(name) or parquet(text=["x" * 500])
    build(tmp_path, {name: content, **OTHER})
    texts = read_texts(_source(str(tmp_path)), 20)
    assert not texts.files and texts.truncated and texts.skipped_text() == "2 past the limit"


SUFFIXES = ["", ".txt", ".json", ".jsonl", ".py", ".log", ".json.gz", ".parquet", ".csv~"]
CONTENTS = [b"", b"text\n", LINES.encode(), json.dumps(ROWS).encode(), b"{", b"[1]", b"\0", b"\xff", b'{"a": {}}']
NAMES = st.builds("{}{}".format, st.sampled_from(["a", ".b", "._c", "caf\u00e9"]), st.sampled_from(SUFFIXES))
FOLDER_NAMES = st.lists(st.sampled_from(["x", ".git", "__pycache__", "node_modules"]), max_size=3)


@given(
    files=st.dictionaries(st.tuples(st.builds("/".join, FOLDER_NAMES), NAMES), st.sampled_from(CONTENTS), max_size=9)
)
@settings(max_examples=60, deadline=None)
def test_each_file_is_read_or_counted(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, str], bytes]
) -> None:
    root = build(
        tmp_path_factory.mktemp("any"), {f"{at}/{name}".lstrip("/"): each for (at, name), each in files.items()}
    )
    _, texts = read(root)
    counted = sum(n for kind, n in texts.skipped.items() if not kind.startswith(("lines of ", "entries of ")))
    assert len(texts.files) + counted == len(files)


VALUES = st.recursive(
    st.text(max_size=9) | st.floats() | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
ROWS_OF_ANY = st.lists(st.dictionaries(st.text(max_size=4) | st.just("text"), VALUES), max_size=6)


@given(
    rows=ROWS_OF_ANY,
    indent=st.sampled_from([None, 0, 2]),
    escaped=st.booleans(),
    chunk=st.integers(1, 40),
    form=st.sampled_from(["lines", "array", "objects"]),
)
@example(rows=[{}, {}, {"text": "0"}], indent=0, escaped=False, chunk=1, form="objects")
@settings(max_examples=80, deadline=None)
def test_what_python_reads_of_json_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    indent: int | None,
    escaped: bool,
    chunk: int,
    form: str,
) -> None:
    def dumped(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=escaped, indent=indent)

    forms: dict[str, Callable[[], str]] = {
        "lines": lambda: "\n".join(map(dumped, rows)),
        "array": lambda: dumped(rows, indent),
        "objects": lambda: "\n".join(dumped(row, indent) for row in rows),
    }
    content = forms[form]()
    root = build(tmp_path_factory.mktemp("json"), {"a.json": content})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("peer.data.text_files._CHUNK_BYTES", chunk)
        texts, _ = read(root)
    wanted = "|".join(row["text"] for row in rows if isinstance(row.get("text"), str) and row["text"])
    assert texts == ([wanted] if wanted else [])


@pytest.mark.parametrize("opened", ["[", '[{"a":', '{"text":"x","a":\n['])
def test_json_that_nests_without_end_is_left_out(tmp_path: Path, opened: str) -> None:
    texts, found = read(build(tmp_path, {"a.json": opened * 100_000, **OTHER}))
    assert texts == ["plain text\n"] and found.skipped_text() == "1 JSON nested too deeply"
