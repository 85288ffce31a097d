"""The event log when its file cannot be opened."""

from __future__ import annotations

import gc
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peer.errors import ResourceError
from peer.events import EventLog


@contextmanager
def files_below(fd: int) -> Iterator[None]:
    """Inside the block no file can be opened under that number or a higher one, and no garbage frees a lower one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd, hard))
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def lowest_free() -> int:
    """The number that the next file to be opened gets."""
    gc.collect()  # files that other tests have left open
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def test_a_failed_rotation_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fd = lowest_free()
    log = EventLog(path, rotate_bytes=100)
    with files_below(fd):
        for number in range(6):
            log.emit("tick", number=number)
    assert not path.exists(), "it was to be rotated"
    with (tmp_path / "shard").open("wb") as other:
        log.emit("tick", number=6)
        assert os.fstat(other.fileno()).st_size == 0
    log.emit("tick", number=7)
    log.close()
    assert numbers(tmp_path / "events.1.jsonl") == [*range(7)] and numbers(path) == [7], "and goes on to a new file"


def test_an_unwritable_log_is_reported(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "events.jsonl", tmp_path / "file" / "events.jsonl"):
        with pytest.raises(ResourceError, match=r"cannot be written .*--home"):
            EventLog(path)
