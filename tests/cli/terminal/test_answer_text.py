"""An answer that appears piece by piece: its thinking dimmed on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re

import pytest

from cli.terminal.stream import AnswerText

PIECES = [("Is it", ""), (" \x1b[31m2?\n", ""), ("\tYes.", ""), ("", "It "), ("", "is \x1b[31m2.\n")]
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, pieces: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what goes to standard output."""
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "12")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    answer = AnswerText()
    for thought, text in pieces:
        answer.add(thought, text)
    return out.getvalue()


def test_a_terminal_shows_thinking_dimmed_and_the_answer_below(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(_Terminal(), PIECES, monkeypatch)
    thought, below, answer = text.partition("\n\n")
    assert below and answer == "It is ?[31m2.\n"
    assert "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", thought)) == r"Is it ?[31m2?" + 8 * " " + "Yes."
    assert re.sub(r"\x1b\[[02]m", "", thought) == "Is it ?[31m2?\n" + 8 * " " + "Yes."


def test_thinking_that_is_cut_has_no_answer_below(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(_Terminal(), [("Hm.", "")], monkeypatch) == f"{DIM}Hm.{PLAIN}"
    assert shown(_Terminal(), [("", "Fine.")], monkeypatch) == "Fine."


def test_a_pipe_has_the_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), PIECES, monkeypatch) == "It is ?[31m2.\n"
