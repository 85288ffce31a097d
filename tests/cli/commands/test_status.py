"""`peer status` beside the run itself: the picture of the loss, and tables as wide as the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.text import Text

from cli.commands.status import _PIPELINE, _STAGES, _WHOLE, _table, status
from cli.terminal.screen import drawn, screen
from peer.errors import ConfigError
from tests.cli.views.test_loss_picture import PNG, home_of_a_peer


def test_the_loss_is_drawn_from_a_home_without_the_network(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    home_of_a_peer(tmp_path / "home")
    result = CliRunner().invoke(status, ["--home", str(tmp_path / "home"), "--plot", str(picture)])
    assert result.exit_code == 0 and result.output == f"Drew the loss to {picture}.\n"
    assert picture.read_bytes()[:8] == PNG


def test_a_home_without_a_loss_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(status, ["--home", str(tmp_path), "--plot", str(tmp_path / "curve.png")])
    assert isinstance(result.exception, ConfigError) and "tell of no loss: give the --home" in str(result.exception)


@pytest.mark.parametrize("columns", [_WHOLE, _PIPELINE, _STAGES])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_leaves_out_columns_and_cuts_no_cell(columns: tuple[str, ...], width: int) -> None:
    cells: dict[str, Text | str] = {**dict.fromkeys(columns, "12345678"), "phase": "waiting for the next round"}
    table = _table(columns, [cells], width, ruled=columns is _WHOLE)
    names = [str(column.header) for column in table.columns]
    assert {"round", "phase"} <= set(names) and (width < 120 or names == list(columns))
    console = screen(width=width)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)


def test_what_is_printed_may_be_drawn_in_a_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(lambda: screen().print("one\ntwo")).plain.rstrip() == "one\ntwo"
    assert capsys.readouterr().out == ""
    screen().print("three")
    assert capsys.readouterr().out == "three\n"
