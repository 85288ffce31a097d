"""worker.log holds the traceback of a worker that failed, as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.worker.main import report
from peer.worker.process import _LOG_MAX_BYTES, _open_log


def test_a_traceback_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("a\x1b]0;title\x07 \u202e" + "x" * 100_000)
    except ValueError as error:
        report(type(error), error, error.__traceback__)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("ValueError: a?]0;title? ?xx")
    assert all(line.isprintable() and len(line) <= 300 for line in lines)


def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    victim, log = tmp_path / "victim", tmp_path / "worker.log"
    victim.write_bytes(b"x" * (_LOG_MAX_BYTES + 1))
    log.symlink_to(victim)
    with _open_log(log) as stderr:
        stderr.write(b"words")
    assert victim.stat().st_size == _LOG_MAX_BYTES + 1, "neither written nor emptied"
    assert not log.is_symlink() and log.read_bytes() == b"words"
    log.write_bytes(b"x" * (_LOG_MAX_BYTES + 1))
    with _open_log(log) as stderr:
        stderr.write(b"new")
    assert log.read_bytes() == b"new"
