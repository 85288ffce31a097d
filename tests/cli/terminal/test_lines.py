"""Lines that commands write: plain, cut, and one for each argument."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from cli.terminal.lines import LINE_MAX, plain_reports, say, say_json
from cli.terminal.screen import screen


def test_each_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say("first\nsecond\x1b[2J", "third", "")
    assert capsys.readouterr().out == "first?second?[2J\nthird\n\n"
    say("x" * 500_075, err=True)
    assert len(capsys.readouterr().err) == LINE_MAX + 1


def test_an_invite_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    say("a" * 8192, uncut=True)
    say_json({"invite": "a" * 8192}, uncut=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "a" * 8192 and json.loads(shown[1]) == {"invite": "a" * 8192}


def test_what_libraries_log_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("\x1b[8m hidden")

    found = logging.lastResort
    with plain_reports():
        logging.Logger("of some library").warning("peer %s\nFORGED", "\x1b]0;title\x07")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    shown = capsys.readouterr().err
    assert "peer ?]0;title??FORGED\n" in shown and "?[8m hidden" in shown and "\x1b" not in shown
    assert logging.lastResort is found


def test_a_screen_knows_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    screen(width=80).print("[red]a[/red] :skull: \x1b[2J \u202eb")
    assert capsys.readouterr().out == "[red]a[/red] :skull: ?[2J ?b\n"
