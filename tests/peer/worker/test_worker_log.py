"""worker.log holds the traceback of a worker that failed, as plain text."""

from __future__ import annotations

import pytest

from peer.worker.main import report


def test_a_traceback_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("a\x1b]0;title\x07 \u202e" + "x" * 100_000)
    except ValueError as error:
        report(type(error), error, error.__traceback__)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("ValueError: a?]0;title? ?xx")
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
