"""A data set follows from its documents alone: by a second definition, and in whatever files they lie."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer as HubTokenizer

from peer.data.building.buckets import bucket_path
from peer.data.building.documents import ROW_BYTES_MAX, TEXT_BYTES_MAX, documents_of
from peer.data.building.gathering import BUCKETS, Gathering
from peer.data.building.packing import PackingNote
from peer.data.building.plan import bucket_count, read_note
from peer.data.pages.folder import BuiltPages
from peer.data.text_files import TextReader
from peer.data.tokenizer import BYTES, ByteTokenizer, Ids
from peer.errors import ConfigError
from tests.peer.data.building.builds import (
    END,
    built,
    defined,
    gathered,
    packing,
    plan_of,
    random_documents,
    small_tokenizer,
    windows_of,
)


def as_lines(documents: list[bytes]) -> bytes:
    return b"".join(json.dumps({"text": text.decode()}).encode() + b"\n" for text in documents)


def write_lines(path: Path, documents: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_lines(documents))
    return path


@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(1, 16), Fraction(0)])
@pytest.mark.parametrize("kind", ["bytes", "special", "empty line"])
def test_it_holds_what_the_definition_says(tmp_path: Path, kind: str, share: Fraction) -> None:
    documents = random_documents(300, seed=share.denominator)
    documents.append(documents[0])  # a copy counts twice
    tokenizer, ids = BYTES, [[*text, 10, 10] for text in documents]
    if kind != "bytes":
        tokenizer = str(small_tokenizer(tmp_path, (END,) if kind == "special" else ()))
        hub = HubTokenizer.from_file(tokenizer)
        end = [hub.token_to_id(END)] if kind == "special" else hub.encode("\n\n").ids
        ids = [hub.encode(text.decode()).ids + end for text in documents]
    source = write_lines(tmp_path / "text" / "a.jsonl", documents)
    index = built([source], tmp_path, tokenizer, validation_share=float(share), seed=7)
    expected = defined(documents, ids, 31, share, seed=7)
    assert windows_of(tmp_path / "out") == expected
    assert len(expected[0]) > 10 and index.held_out.windows == len(expected[1])
    assert index.train.documents + index.held_out.documents == len(documents)
    assert index.train.text_bytes + index.held_out.text_bytes == sum(map(len, documents))
    assert not [*BuiltPages.open(tmp_path / "out").damaged()]


def test_the_held_out_part_grows_to_one_window(tmp_path: Path) -> None:
    documents = [b"%03d" % at for at in range(100)]
    index = built([write_lines(tmp_path / "t" / "a.jsonl", documents)], tmp_path, validation_share=0.0)
    assert (index.held_out.windows, index.held_out.documents) == (1, 7)  # 5 ids each, 32 a window


def test_files_their_names_and_order_do_not_matter(tmp_path: Path) -> None:
    documents = random_documents(400)
    parts = [documents[at::5] for at in range(5)]
    first = tmp_path / "first"
    for number, part in enumerate(parts):
        write_lines(first / f"{number}.jsonl", part)
    other = tmp_path / "other" / "deep"
    write_lines(other / "z.jsonl", parts[2][::-1])
    (other / "a.jsonl.gz").write_bytes(gzip.compress(as_lines(parts[4])))
    (other / "b.json.zst").write_bytes(zstandard.ZstdCompressor().compress(as_lines(parts[0])))
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    table = arrow.table({"text": [text.decode() for text in parts[1]], "id": [*range(len(parts[1]))]})
    parquet.write_table(table, other / "c.parquet", row_group_size=7)
    (other / "d.json").write_text(json.dumps([{"text": text.decode()} for text in parts[3]]))
    tokenizer = str(small_tokenizer(tmp_path))
    roots = {
        built([first], tmp_path / "1", tokenizer).config.root,
        built([other], tmp_path / "2", tokenizer, buckets=1).config.root,
        built([other / "d.json", *sorted(other.glob("[a-cz]*"))], tmp_path / "3", tokenizer, buckets=64).config.root,
    }
    assert len(roots) == 1
    assert built([first], tmp_path / "4", tokenizer, seed=1).config.root not in roots


def test_a_long_text_is_cut_at_the_same_places_from_any_file(tmp_path: Path) -> None:
    line = b"a line of text, " * 4000 + b"\n"
    text = line * 40 + "é".encode() * TEXT_BYTES_MAX
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(text))
    found = [[*documents_of(TextReader(), path)] for path in sorted(tmp_path.iterdir())]
    assert found[0] == found[1] == found[2] and b"".join(found[0]) == text
    sizes = [len(document) for document in found[0]]
    assert max(sizes) <= TEXT_BYTES_MAX and sizes[0] == TEXT_BYTES_MAX // len(line) * len(line)
    assert all(document.decode() for document in found[0])


def test_a_long_row_is_cut(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [b"x" * (ROW_BYTES_MAX + 5), b"y"])
    assert [len(text) for text in documents_of(TextReader(), path)] == [ROW_BYTES_MAX, 5, 1]


def test_a_json_value_has_a_largest_size(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [b"y", b"x" * (3 << 20)])
    whole = [*documents_of(TextReader(), path)]
    assert len(whole) == 2
    with pytest.raises(Exception, match="JSON with a value of more than 2 MiB"):
        [*documents_of(TextReader(value_bytes_max=2 << 20), path)]


def test_it_says_what_it_could_not_read(tmp_path: Path) -> None:
    text = tmp_path / "text"
    write_lines(text / "good.jsonl", random_documents(50))
    for number in range(12):
        (text / f"bad-{number:02}.txt.gz").write_bytes(b"no gzip")
    (text / "empty.txt").touch()
    plan = plan_of([text])
    found = gathered(plan, tmp_path / "1")
    assert found.documents == 50 and found.unreadable_files == 12 and len(found.unreadable) == 10
    assert found.unreadable[0] == f"{text}/bad-00.txt.gz (damaged .gz)"
    assert found.skipped == {"damaged .gz": 12, "empty": 1}
    with pytest.raises(ConfigError, match=r"bad-00.txt.gz cannot be read \(damaged .gz\): repair it"):
        gathered(plan, tmp_path / "2", is_strict=True)


def test_too_little_text_for_a_window_of_each_part(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "t" / "a.jsonl", [b"a short text"] * 3)
    with pytest.raises(ConfigError, match="there are 0 tokens to train on, and a window takes 64: add text"):
        built([source], tmp_path, seq_len=63)


def test_an_end_of_text_is_a_special_token(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "t" / "a.jsonl", random_documents(50))
    tokenizer = str(small_tokenizer(tmp_path, ("<stop>",)))
    assert built([source], tmp_path / "1", tokenizer, end_of_text="<stop>").end_of_text == "<stop>"
    assert built([source], tmp_path / "2", tokenizer).end_of_text == ""
    for of, named in ((tokenizer, "barn"), (tokenizer, "<none>"), (BYTES, "<stop>")):
        with pytest.raises(ConfigError, match=f"--end-of-text '{named}' is no special token of the tokenizer"):
            built([source], tmp_path / "3", of, end_of_text=named)


def test_buckets_are_of_one_size(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    (found,) = plan_of([tmp_path]).files
    sized = [type(found)(found.path, size, 0) for size in (1, 48 << 20, 49 << 20, 1 << 40)]
    assert [bucket_count([file], "0" * 64) for file in sized] == [1, 1, 2, 512]
    assert bucket_count([sized[1]], BYTES) == 2  # two bytes for one


class Stop(Exception):
    """Ends a build in the middle."""


@dataclass
class StoppingTokenizer(ByteTokenizer):
    """Ends the build after some texts."""

    left: int

    def encode_texts(self, texts: Iterable[str]) -> Iterator[Ids]:
        for ids in super().encode_texts(texts):
            if not self.left:
                raise Stop
            self.left -= 1
            yield ids


def test_a_build_continues_where_it_was(tmp_path: Path) -> None:
    """Each pass ends after each of its steps, and the next one begins with what is on disk."""
    source = write_lines(tmp_path / "t" / "a.jsonl", random_documents(200))
    other = write_lines(tmp_path / "t" / "b.jsonl", random_documents(100, seed=2))
    plan = plan_of([source, other])
    whole = packing(plan, tmp_path / "1", gathered(plan, tmp_path / "1")).run()
    folder, stops, found = tmp_path / "2", 0, None
    folder.mkdir()
    while found is None:
        try:
            found = Gathering(plan, folder, StoppingTokenizer(60)).run()
        except Stop:
            stops += 1
            with bucket_path(folder / BUCKETS, stops % plan.buckets).open("ab") as file:
                file.write(b"the half of a block")
    assert stops >= 5
    work, index, ended = packing(plan, folder, found), None, 0
    while index is None:
        try:
            index = replace(work, progress=stop).run()
        except Stop:
            ended += 1
            note = read_note(folder / "note", PackingNote)
            assert note is not None and note.bucket == ended
            work = replace(work, note=note)
            with (folder / "out" / "train-00000.pages").open("ab") as pages:
                pages.write(b"the half of a window")
    assert index == whole and ended == plan.buckets
    assert windows_of(folder / "out") == windows_of(tmp_path / "1" / "out")


def stop(done_bytes: int, of_bytes: int) -> None:
    raise Stop
