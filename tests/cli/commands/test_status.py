"""`peer status` beside the run itself: a run whose peers are gone, the picture of the loss, tables as wide as the
terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.text import Text

from cli.commands.status import _PIPELINE, _STAGES, _WHOLE, _table, status
from cli.run import report_failure
from cli.terminal.screen import drawn, screen
from peer.errors import ConfigError, DialError, NotAdmitted
from swarm.client.status import picture
from swarm.inference import model_status
from tests.cli.support.kept_scene import ended_run, home_of_a_member
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


def test_of_a_run_whose_peers_are_gone_it_shows_what_the_home_keeps(tmp_path: Path) -> None:
    """With a real connection that is refused."""
    home, _ = home_of_a_member(tmp_path / "h", ended_run())
    result = CliRunner(env={"COLUMNS": "80"}).invoke(status, ["--home", str(home)])
    assert "No peer answers. The home was last written" in result.output and "a run  run " in result.output
    assert "last head: round 3" in result.output and "held-out loss 3.250 (round 2)" in result.output
    assert max(map(len, result.output.splitlines())) <= 100
    assert result.exception is not None and report_failure(result.exception) == 3, "as without a home"


def test_the_json_keeps_what_is_kept_apart_from_what_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = ended_run()
    home, invite = home_of_a_member(tmp_path / manifest.run_id[:12], manifest)
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    answers: list[Any] = [DialError("none answers", "refused"), DialError("none answers", "refused")]

    async def read(*_: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(model_status, "read_any_status", read)
    for source in (["--home", str(home)], [str(invite)]):  # by the invite: the home in the default place
        told = json.loads(CliRunner().invoke(status, [*source, "--json"]).output)
        assert told.keys() == {"run_id", "home"} and told["run_id"] == manifest.run_id
        assert told["home"]["heads"][0]["round"] == 3 and told["home"]["losses"][-1]["train"] == 2.0
    seen = model_status.run_status(picture(manifest, {}, [None], 0.0), 1, {}, 0.0)
    answers += [seen, NotAdmitted("banned"), DialError("none answers", "refused")]
    result = CliRunner().invoke(status, ["--home", str(home), "--json"])
    assert result.exit_code == 0 and "home" not in json.loads(result.output), "peers that answer win"
    assert CliRunner().invoke(status, ["--home", str(home)]).output == "", "another fault tells of no home"
    (home / "manifest.msgpack").unlink()
    assert CliRunner().invoke(status, ["--home", str(home)]).output == ""
