"""Files of an unfinished build that were changed: the build begins again, ends with a sentence, or is not affected."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from peer.data.building import gathering
from peer.data.building.buckets import BucketWriter, bucket_path, read_bucket
from peer.data.building.gathering import BUCKETS, JOURNAL
from peer.data.building.packing import PackingNote
from peer.data.building.plan import read_note, write_note
from peer.errors import CheckpointError
from tests.peer.data.building.builds import gathered, packing, plan_of, random_documents


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return data with a bit turned, bytes left out, put in, or written twice."""
    at = chance.randrange(len(data))
    kind = chance.randrange(4)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + chance.randbytes(5) + data[at:]
    return data[:at] + data[at // 2 : at] + data[at:]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(json.dumps({"text": text.decode()}) for text in random_documents(200)))
    return path.parent


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_bucket_is_refused(tmp_path: Path, source: Path, seed: int) -> None:
    plan = plan_of([source], seq_len=7)
    chance, found = random.Random(seed), gathered(plan, tmp_path)
    number = chance.choice([at for at, size in enumerate(found.sizes) if size])
    path = bucket_path(tmp_path / BUCKETS, number)
    path.write_bytes(mutated(path.read_bytes(), chance))
    with pytest.raises(CheckpointError, match=r"was changed .*: delete that folder, and build again"):
        packing(plan, tmp_path, found).run()


@pytest.mark.parametrize("seed", range(20))
def test_with_a_changed_journal_the_first_pass_begins_again(tmp_path: Path, source: Path, seed: int) -> None:
    plan = plan_of([source])
    found, journal = gathered(plan, tmp_path), tmp_path / JOURNAL
    journal.write_bytes(mutated(journal.read_bytes(), random.Random(seed)))
    assert gathered(plan, tmp_path) == found
    assert packing(plan, tmp_path, found).run().train.windows > 10


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_note_is_none(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "note"
    write_note(path, PackingNote(plan=b"p" * 32, gathered=gathered(plan_of([]), tmp_path)))
    assert read_note(path, PackingNote) is not None
    path.write_bytes(mutated(path.read_bytes(), random.Random(seed)))
    assert read_note(path, PackingNote) is None


def test_buckets_shorter_than_the_journal_says_begin_again(tmp_path: Path, source: Path) -> None:
    plan = plan_of([source])
    found = gathered(plan, tmp_path)
    for number in range(plan.buckets):
        bucket_path(tmp_path / BUCKETS, number).unlink(missing_ok=True)
    assert gathered(plan, tmp_path) == found
    assert packing(plan, tmp_path, found).run().train.windows > 10


def test_pages_that_were_changed_meanwhile_are_refused(tmp_path: Path, source: Path) -> None:
    plan = plan_of([source], seq_len=7)
    work = packing(plan, tmp_path, gathered(plan, tmp_path))
    work.run()
    (tmp_path / "out" / "train-00000.pages").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"train-00000.pages is shorter than it was\): delete that folder"):
        work.run()


def lies(folder: Path, key: bytes, text_bytes: int, ids: bytes, count: int) -> int:
    writer = BucketWriter(folder, count)
    writer.open([])
    writer.add(key, text_bytes, ids)
    writer.flush(2)
    return max(writer.sizes)


@pytest.mark.parametrize(
    ("key", "text_bytes", "ids", "reason"),
    [
        (b"\x80" + bytes(31), 3, b"\x00\x01", "an id is not in the vocabulary"),
        (b"\x80" + bytes(31), 17 << 20, b"\x01\x00", "a document is too long"),
        (bytes(32), 3, b"\x01\x00", "a key belongs to another bucket"),
    ],
)
def test_what_the_worker_wrote_is_checked(tmp_path: Path, key: bytes, text_bytes: int, ids: bytes, reason: str) -> None:
    size_bytes = lies(tmp_path, key, text_bytes, ids, 2)
    if "another bucket" in reason:
        bucket_path(tmp_path, 0).rename(bucket_path(tmp_path, 1))
    with pytest.raises(ValueError, match=reason):
        read_bucket(tmp_path, 1, 2, size_bytes, 256)


def test_after_a_restart_of_the_machine_the_buckets_are_looked_at(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of([source])
    found = gathered(plan, tmp_path)
    path = bucket_path(tmp_path / BUCKETS, 1)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    assert gathered(plan, tmp_path) == found and path.read_bytes() != whole
    monkeypatch.setattr(gathering, "_boot", lambda: "another")
    assert gathered(plan, tmp_path) == found
    assert path.read_bytes() == whole
