"""A live view and the lines beside it share one terminal: nothing is drawn over, and an invite stays whole."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

from cli.progress.progress import Progress
from cli.templates import template
from cli.terminal import screen as screen_module
from cli.terminal.lines import say
from cli.views.table import live_view
from tests.cli.support.seen_in import LINES, Terminal, forked
from tests.support.newer_trio import run_abandonable
from tests.support.ports import free_port

LONG = "barnraise3" + "".join(chr(97 + number % 26) for number in range(330))


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_a_line_beside_a_live_view_stays_whole(columns: int) -> None:
    written = io.StringIO()
    console = screen_module._PlainConsole(
        file=written, width=columns, height=LINES, force_terminal=True, legacy_windows=False, markup=False, emoji=False
    )
    progress = Progress("coordinator")
    progress.apply("c", "run_entered", 1.0, {"name": "r", "role": "coordinator", "rounds": 9, "stages": 1})
    with screen_module.live(live_view(progress, columns), console) as display:
        say("To take part:", err=True)
        say(LONG, err=True, uncut=True)
        progress.pinned = "The invite stands in HOME/invite"
        for number in range(5):
            progress.apply("c", "head_seen", 2.0, {"round": number, "members": 3})
            display.update(live_view(progress, columns), refresh=True)
        say("Stopping cleanly", err=True)
        display.update(live_view(progress, columns), refresh=True)
    terminal = Terminal(columns)
    terminal.write(written.getvalue().replace("\n", "\r\n").encode())
    rows = [row.rstrip() for row in terminal.rows]
    text = terminal.text
    assert LONG in text and text.count(LONG[:20]) == 1
    assert text.count("Stopping cleanly") == 1 and text.count("The invite stands in HOME/invite") == 1
    assert rows.index("To take part:") < next(n for n, row in enumerate(rows) if row.startswith("Stopping"))
    assert text.index("Stopping") < text.rindex("round 4 committed"), "the view is below all lines"


def test_lines_go_their_usual_way_without_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    with screen_module.live("", Console(file=io.StringIO(), force_terminal=True)):
        say("to the pipe")  # standard output is no terminal here
    say("after", err=True)
    assert capsys.readouterr() == ("to the pipe\n", "after\n")


@pytest.mark.process
async def test_coordinate_and_join_show_what_the_operator_needs(tmp_path: Path) -> None:
    """The invite can be copied from the screen while the view is redrawn, in pieces as well; both stop cleanly."""
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    toml = tmp_path / "run.toml"
    toml.write_text(template().replace("rounds = 12", "rounds = 0"))
    home = tmp_path / "c"
    async with forked(80, "coordinate", str(toml), "--home", str(home), "--listen", address) as (shown, coordinator):
        await shown.until(lambda text: "The invite stands in" in text and "waiting for peers" in text)
        invite = (home / "invite").read_text().strip()
        assert invite in shown.text, shown.rows
        assert "Only this machine can reach that address" in shown.text.replace("  ", " ")
        halves = (invite[:100], invite[100:])
        async with forked(100, "join", *halves, "--home", str(tmp_path / "p"), "--device", "cpu") as (seen, peer):
            await seen.until(lambda text: "text as bytes" in text)
            assert invite in shown.text
            peer.send_signal(signal.SIGINT)
            assert await run_abandonable(peer.wait, 60) == 130
            await seen.until(lambda text: "Stopping cleanly" in text)
        coordinator.send_signal(signal.SIGINT)
        assert await run_abandonable(coordinator.wait, 60) == 130
        await shown.until(lambda text: "Stopping cleanly" in text and "The run is kept in" in text)
        assert invite in shown.text
