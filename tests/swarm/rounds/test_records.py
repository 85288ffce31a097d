"""The log of a node's records: what is reported as written survives, what was torn never counted, damage is told."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from peer.errors import ResourceError
from swarm.protocol.agreement.records import BALLOT_KEY
from swarm.rounds import records as records_module
from swarm.rounds.records import LOG_NAME, RecordFiles


def log_of(folder: Path, *batches: dict[str, bytes]) -> list[int]:
    """Write the batches; return the length of the log after each."""
    files, sizes = RecordFiles(folder), []
    for batch in batches:
        files.write(batch)
        sizes.append((folder / LOG_NAME).stat().st_size)
    return sizes


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    log_of(tmp_path / "a" / "b", {"ballot": b"1", "link/0": b"x"}, {"ballot": b"2"}, {"link/1": b""})
    assert RecordFiles(tmp_path / "a" / "b").read() == {"ballot": b"2", "link/0": b"x", "link/1": b""}
    assert RecordFiles(tmp_path / "none").read() == {}


def test_a_torn_end_was_never_reported(tmp_path: Path) -> None:
    """At each byte of the last write: what was there before counts, and later writes go on from there."""
    first, whole = log_of(tmp_path, {"ballot": b"1", "fence": b"f"}, {"ballot": b"2" * 40})
    log = (tmp_path / LOG_NAME).read_bytes()
    for cut in range(first, whole):
        for rest in (b"", bytes(whole - cut)) if cut == first else (b"",):
            (tmp_path / LOG_NAME).write_bytes(log[:cut] + rest)
            assert RecordFiles(tmp_path).read() == {"ballot": b"1", "fence": b"f"}
            RecordFiles(tmp_path).write({"fence": b"g"})
            assert RecordFiles(tmp_path).read() == {"ballot": b"1", "fence": b"g"}


def test_damage_is_told(tmp_path: Path) -> None:
    """Any changed byte, also of the last entry, which a torn write cannot explain: votes may have been lost."""
    (size,) = log_of(tmp_path, {"fence": b"f", "ballot": b"1"})
    log = (tmp_path / LOG_NAME).read_bytes()
    for at in range(size):
        (tmp_path / LOG_NAME).write_bytes(log[:at] + bytes([log[at] ^ 0x10]) + log[at + 1 :])
        assert RecordFiles(tmp_path).read()[BALLOT_KEY] == b""
        RecordFiles(tmp_path).write({"identity": b"another"})
        assert RecordFiles(tmp_path).read()["identity"] == b"another"
    (tmp_path / LOG_NAME).unlink()
    (tmp_path / LOG_NAME).mkdir()
    assert RecordFiles(tmp_path).read() == {BALLOT_KEY: b""}


def test_a_long_log_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "REWRITTEN_MIN", 1000)
    files, chance = RecordFiles(tmp_path), Random(1)
    expected: dict[str, bytes] = {}
    for number in range(300):
        batch = {f"link/{chance.randrange(8)}": chance.randbytes(50), "ballot": number.to_bytes(2, "big")}
        expected |= batch
        files.write(batch)
    assert RecordFiles(tmp_path).read() == expected
    assert (tmp_path / LOG_NAME).stat().st_size < 5000
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


def test_what_is_written_together_costs_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RecordFiles(tmp_path)
    files.write({"identity": b"me"})
    synced: list[int] = []
    sync = os.fsync

    def noting(fd: int) -> None:
        synced.append(fd)
        sync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    files.write({"link/0": b"x", "ballot": b"y"})
    assert len(synced) == 1


def test_a_write_that_fails_is_raised_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RecordFiles(tmp_path)
    files.write({"ballot": b"1"})

    def full(fd: int, data: bytes, at: int) -> int:
        real(fd, data[:5], at)
        raise OSError(28, "no space left")

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceError):
        files.write({"ballot": b"2"})
    monkeypatch.setattr(os, "pwrite", real)
    assert RecordFiles(tmp_path).read() == {"ballot": b"1"}
    files.write({"ballot": b"3"})
    assert RecordFiles(tmp_path).read() == {"ballot": b"3"}
