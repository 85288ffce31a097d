"""The monitor beside a quickstart: what it says of itself, and that a quickstart goes on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.demo.monitoring import Monitor


@pytest.mark.process
def test_one_that_fails_is_told_of_and_delays_nothing(tmp_path: Path) -> None:
    with Monitor(tmp_path) as monitor:
        monitor.begin(tmp_path / "nonsense")
        assert monitor.address() == f"it does not answer: read {tmp_path / 'monitor.log'}"
        monitor.see_the_end()
    assert monitor.last_words == f"The monitor left no page: read {tmp_path / 'monitor.log'}"


def test_one_that_missed_the_end_says_so(tmp_path: Path) -> None:
    monitor, log = Monitor(tmp_path), tmp_path / "monitor.log"
    monitor.page.parent.mkdir()
    monitor.page.touch()
    log.write_text('{"event":"verdict","level":"good"}\nno JSON\n')
    assert monitor.last_words.endswith(f"index.html; it did not see the end of the run: read {log}")
    with log.open("a") as file:
        file.write('{"event":"verdict","level":"over"}\n')
    assert monitor.last_words == f"The page of the monitor, which needs no server: {monitor.page}"


def test_one_that_was_never_started_ends(tmp_path: Path) -> None:
    with Monitor(tmp_path) as monitor:
        monitor.see_the_end()
    assert list(tmp_path.iterdir()) == []
