"""Commands as a user types them, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from cli.main import main


class Ended(NamedTuple):
    """The end of a command."""

    code: int
    stderr: str
    stdout: str


Peer = Callable[..., Ended]


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Peer:
    """Return a function that runs `peer ARGUMENTS` in this process, as the console script would."""

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["peer", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        shown = capsys.readouterr()
        return Ended(ended.value.code, shown.err, shown.out)

    return run


def said(ended: Ended, code: int) -> str:
    """Return the last line on standard error, after checking the exit code."""
    assert ended.code == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]
