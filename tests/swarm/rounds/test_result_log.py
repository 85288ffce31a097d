"""The results on disk: what a member writes stays until a checkpoint has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def test_no_drop_removes_what_is_being_written(tmp_path: Path) -> None:
    """A checkpoint is saved in another thread while a vote waits for its results."""
    log: Any = ResultLog(tmp_path)
    log.stage(b"name", PARTS)
    for number in range(STAGED_MAX + 2):  # newer ones, all in vain
        log.stage(bytes([number]), PARTS)
    write = log._write

    def write_later(*arguments: Any, **options: Any) -> None:
        log.drop(0)
        write(*arguments, **options)

    log._write = write_later
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
