"""`peer status` beside the run itself: a run whose peers are gone, the picture of the loss, tables as wide as the
terminal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.commands.status import status
from cli.commands.top import top
from cli.run import report_failure
from cli.terminal.screen import screen
from cli.views.columns import table_lines
from cli.views.members import member_cells, server_cells
from cli.views.monitor_view import monitor_view
from peer.errors import ConfigError, DialError, NotAdmitted
from peer.identity import Identity
from swarm.monitor import collector
from swarm.monitor.collector import MonitorCollector
from swarm.run.invite import Invite
from swarm.status.state import MonitorState
from tests.cli.support.kept_scene import ended_run, home_of_a_member
from tests.cli.views.test_loss_picture import PNG, home_of_a_peer
from tests.cli.views.test_monitor_view import crowd


def test_the_loss_is_drawn_from_a_home_without_the_network(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    home_of_a_peer(tmp_path / "home")
    result = CliRunner().invoke(status, ["--home", str(tmp_path / "home"), "--plot", str(picture)])
    assert result.exit_code == 0 and result.output == f"Drew the loss to {picture}.\n"
    assert picture.read_bytes()[:8] == PNG


def test_a_home_without_a_loss_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(status, ["--home", str(tmp_path), "--plot", str(tmp_path / "curve.png")])
    assert isinstance(result.exception, ConfigError) and "have no loss: give the --home" in str(result.exception)


@pytest.mark.parametrize("cells", [member_cells, server_cells])
@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_a_table_leaves_out_columns_and_cuts_no_cell(cells: Any, width: int) -> None:
    member = crowd().members[0]
    row = {**dict.fromkeys(cells(member), "12345678"), "phase": "exchanging"}
    heading, line = (text.plain for text in table_lines([(row, "")], width))
    assert {"peer", "phase"} <= set(heading.split()) and (width < 160 or heading.split() == list(row))
    assert len(line) <= width + 1 and set(line.split()) == {"12345678", "exchanging"}


@pytest.mark.parametrize(("command", "options"), [(status, []), (top, ["--once"])])
def test_both_commands_print_the_same(command: Any, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def once(self: MonitorCollector) -> MonitorState:
        return crowd()

    monkeypatch.setattr(MonitorCollector, "once", once)
    authority = Identity.generate().peer_id
    invite = str(Invite("r" * 32, authority, (f"/ip4/127.0.0.1/tcp/1/p2p/{authority}",)))
    printed = CliRunner().invoke(command, [invite, *options]).output
    console = screen(width=160)
    with console.capture() as captured:
        console.print(monitor_view(crowd(), 160), soft_wrap=True)
    assert printed == captured.get() and "…" not in printed
    told = json.loads(CliRunner().invoke(command, [invite, *options, "--json"]).output)
    assert told["verdict"]["word"] == "complete, not kept" and told["kind"] == "run"


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

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[None]:
        if isinstance(answer := answers.pop(0), BaseException):
            raise answer
        yield

    async def look(self: MonitorCollector, client: object) -> None:
        self.state = crowd()

    monkeypatch.setattr(collector, "open_client", opened)
    monkeypatch.setattr(MonitorCollector, "_look", look)
    for source in (["--home", str(home)], [str(invite)]):  # by the invite: the home in the default place
        told = json.loads(CliRunner().invoke(status, [*source, "--json"]).output)
        assert told.keys() == {"run_id", "home"} and told["run_id"] == manifest.run_id
        assert told["home"]["heads"][0]["round"] == 3 and told["home"]["losses"][-1]["train"] == 2.0
    answers += [None, NotAdmitted("banned"), DialError("none answers", "refused")]
    result = CliRunner().invoke(status, ["--home", str(home), "--json"])
    assert result.exit_code == 0 and json.loads(result.output)["home"] is None, "peers that answer win"
    assert CliRunner().invoke(status, ["--home", str(home)]).output == "", "another fault tells of no home"
    (home / "manifest.msgpack").unlink()
    assert CliRunner().invoke(status, ["--home", str(home)]).output == ""
