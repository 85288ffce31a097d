"""The monitor beside a quickstart: what it says of itself, and that a quickstart goes on without it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cli.demo.monitoring import Monitor
from cli.progress.progress import Progress
from cli.terminal import screen as screen_module
from cli.views.table import live_view
from tests.cli.support.seen_in import LINES, Terminal


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


@pytest.mark.parametrize("peers", [3, 16])
def test_its_address_stays_on_the_screen_while_the_view_is_redrawn(peers: int) -> None:
    """Also where the table is longer than the terminal, whose end is cut."""
    written = io.StringIO()
    console = screen_module._PlainConsole(
        file=written, width=80, height=LINES, force_terminal=True, legacy_windows=False, markup=False, emoji=False
    )
    progress = Progress("quickstart", keeps_all=True)
    progress.pin("monitor: http://127.0.0.1:8081/")
    with screen_module.live(live_view(progress, 80), console) as display:
        for number in range(1, 30):
            for peer in range(peers):
                fields = {"round": number, "members": peers, "state_hash": "ab" * 32, "loss": 2.0}
                progress.apply(f"peer-{peer}", "round_committed", float(number), fields)
                progress.apply(f"peer-{peer}", "state_progress", 1.0, {"done_bytes": 1, "size_bytes": 4})
            progress.note(f"added peer-{number}")
            display.update(live_view(progress, 80), refresh=True)
        terminal = Terminal(80)
        terminal.write(written.getvalue().replace("\n", "\r\n").encode())
    seen = [row.rstrip() for row in terminal.rows[-LINES:]]
    assert seen.count("monitor: http://127.0.0.1:8081/") == 1, seen
    assert any("peer-2" in row for row in seen)


def test_where_there_is_no_terminal_its_address_is_said_once() -> None:
    said = list[str]()
    progress = Progress("quickstart", say=said.append)
    progress.pin("monitor: http://127.0.0.1:8081/")
    assert said == ["monitor: http://127.0.0.1:8081/"]
