"""Bytes that leave memory: in files without a name, each of which is used again once nobody reads it."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from peer.errors import ResourceError
from swarm.rounds.exchange import spool_files
from swarm.rounds.exchange.spool_files import SpoolFiles


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the files that were made."""
    made: list[int] = []
    create: Callable[..., IO[bytes]] = tempfile.TemporaryFile

    def note(**options: Any) -> IO[bytes]:
        file = create(**options)
        made.append(os.fstat(file.fileno()).st_ino)
        return file

    monkeypatch.setattr(spool_files, "TemporaryFile", note)
    return made


def drawn(*sizes: int) -> list[memoryview]:
    return [memoryview(os.urandom(size)) for size in sizes]


def test_the_parts_lie_in_a_file_as_they_were_given(tmp_path: Path) -> None:
    parts = drawn(5000, 1, 70_000)
    found = SpoolFiles(tmp_path / "results").write(parts)
    assert [bytes(part) for part in found] == [bytes(part) for part in parts]
    assert all(part.readonly for part in found)
    assert not list((tmp_path / "results").iterdir()), "a file without a name goes with its process"


def test_a_file_is_used_again_when_none_of_its_parts_is_read_any_more(tmp_path: Path, opened: list[int]) -> None:
    files, first, second, third = SpoolFiles(tmp_path), drawn(9000, 40), drawn(100, 8000), drawn(20_000)
    kept = files.write(first)[1]  # a part of the first is still read
    found = files.write(second)
    assert len(opened) == 2 and bytes(kept) == bytes(first[1])
    del found
    found = files.write(third)
    assert len(opened) == 2, "the second file was free"
    assert bytes(found[0]) == bytes(third[0]) and bytes(kept) == bytes(first[1])
    del kept
    assert bytes(files.write(first)[0]) == bytes(first[0]) and len(opened) == 2
    assert bytes(found[0]) == bytes(third[0])


def test_a_file_that_was_larger_takes_no_more_room_than_its_bytes(tmp_path: Path, opened: list[int]) -> None:
    files = SpoolFiles(tmp_path)
    files.write(drawn(1 << 20))
    [part] = files.write(drawn(10))
    assert isinstance(part.obj, mmap.mmap) and part.obj.size() == len(part) == 10 and len(opened) == 1


def test_a_full_disk_is_named_and_what_is_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, parts = SpoolFiles(tmp_path), drawn(4000)
    [kept] = files.write(parts)

    def full(file: IO[bytes], sizes: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_files, "map_parts", full)
    with pytest.raises(ResourceError, match=r"No space left on device.*free some space or choose another --home"):
        files.write(drawn(4000))
    assert bytes(kept) == bytes(parts[0])
