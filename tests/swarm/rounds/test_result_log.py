"""The results on disk: what a member writes stays until a checkpoint has it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from peer.errors import ResourceError
from swarm.protocol.head import genesis
from swarm.rounds import result_log
from swarm.rounds.result_log import STAGED_MAX, LoggedResult, ResultLog

PARTS = [memoryview(b"first"), memoryview(b"second")]
RESULT = LoggedResult(genesis("run", bytes(32)), b"w" * 32, PARTS)


@pytest.fixture(autouse=True)
def _every_result_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_log, "STAGED_BYTES", 1)


def bytes_of(result: LoggedResult) -> bytes:
    return b"".join(result.parts)


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_a_result_is_there_after_a_restart(tmp_path: Path, staged: bool, prepared: bool) -> None:
    log = ResultLog(tmp_path / "results")
    if prepared:
        log.prepare()
    if staged:
        log.stage(b"name", PARTS)
        assert not ResultLog(tmp_path / "results").load(), "it is not known yet where it leads"
    log.write(RESULT, b"name")
    assert log.has(RESULT.leads_to)
    [found] = ResultLog(tmp_path / "results").load().values()
    assert bytes_of(found) == b"firstsecond" and found.leads_to == RESULT.leads_to


def test_no_drop_removes_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is saved in another thread while a vote waits for its results."""
    log = ResultLog(tmp_path)
    log.stage(b"name", PARTS)
    for number in range(STAGED_MAX + 2):  # newer ones, all in vain
        log.stage(bytes([number]), PARTS)
    sync = os.fsync

    def sync_later(fd: int) -> None:
        log.drop(0)
        sync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", sync_later)
        log.write(RESULT, b"name")
    [found] = ResultLog(tmp_path).load().values()
    assert bytes_of(found) == b"firstsecond"


def test_what_was_staged_in_vain_is_removed_in_the_end(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    for number in range(3 * STAGED_MAX):
        log.stage(bytes([number]), PARTS)
    log.prepare()
    log.drop(0)
    assert len(list(tmp_path.iterdir())) == STAGED_MAX
    log.write(RESULT, bytes([0]))  # its file is gone
    [found] = ResultLog(tmp_path).load().values()
    assert bytes_of(found) == b"firstsecond"


def test_a_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    log = ResultLog(tmp_path)
    log.prepare()
    for path in tmp_path.iterdir():
        path.unlink()
    log.write(RESULT, b"name")
    assert ResultLog(tmp_path).load()


@pytest.mark.parametrize("sizes", [(5000,), (4096, 8192), (1, 4095, 10_000_000), (3, 9 << 20, 4 << 20, 17)])
@pytest.mark.parametrize("direct", ["past the cache", "no such flag", "refused", "refused later"])
def test_large_results_are_whole_whatever_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], direct: str
) -> None:
    """A folder that allows no write past the system's cache says so when the file is opened, or at a write."""
    parts = [memoryview(random.Random(size).randbytes(size)) for size in sizes]
    write, left = os.write, [1]

    def refuse(fd: int, data: memoryview) -> int:
        left[0] -= 1
        if left[0] < 0 or direct == "refused":
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    if direct == "no such flag":
        monkeypatch.delattr(os, "O_DIRECT")
    elif direct != "past the cache":
        monkeypatch.setattr(os, "write", refuse)
    log = ResultLog(tmp_path)
    log.stage(b"name", parts)
    monkeypatch.undo()
    written = log.write(LoggedResult(RESULT.before, RESULT.leads_to, parts), b"name")
    [found] = ResultLog(tmp_path).load().values()
    assert bytes_of(found) == bytes_of(written) == b"".join(parts)


def test_a_full_disk_is_named_while_a_result_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next write of the same result begins anew."""
    parts = [memoryview(bytes(5 << 20))]
    log = ResultLog(tmp_path)

    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(ResourceError, match=r"No space left on device\): free some space"):
            log.stage(b"name", parts)
    log.write(LoggedResult(RESULT.before, RESULT.leads_to, parts), b"name")
    [found] = ResultLog(tmp_path).load().values()
    assert bytes_of(found) == bytes(5 << 20)
