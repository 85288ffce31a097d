"""The monitor's state in 80 columns and 24 lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli.progress.kept_home import kept_home
from cli.terminal.screen import screen
from cli.views.monitor_view import monitor_view
from swarm.status.state import Alert, MonitorState, Verdict, Watch
from tests.cli.support.kept_scene import ended_run, home_of_a_member
from tests.swarm.status.scenes import chain_of, finite, heads_of, model_shown, peer, server, shown, told


def drawn(state: MonitorState, capsys: pytest.CaptureFixture[str], height: int = 23) -> list[str]:
    console = screen(width=80)
    console.print(monitor_view(state, 80, height))
    return capsys.readouterr().out.splitlines()


def crowd(**named: Any) -> MonitorState:
    manifest, names = finite(), [f"m{n}" for n in range(30)]
    records = {name: peer(name=f"peer {name}", round=4, speed=2.0) for name in names}
    records["m0"] = peer(name=named.get("name", "ann"), round=4)
    events = {"m0": [told("worker_died")] * 20, "m1": [told("round_discarded", round=n) for n in range(30)]}
    events = named.get("told", events)
    return shown(manifest, records, [chain_of(heads_of(manifest, names, 9))], names[:20], told=events)


def test_all_parts_fit_on_a_small_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(crowd(), capsys)
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        "COMPLETE",
        "stage blocks",
        "ann ",
        "last rounds (proved)",
        "round 9: 30 took part",
        "events (claimed)",
    ):
        assert part in text, text


def test_more_room_shows_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(drawn(crowd(), capsys)) < len(drawn(crowd(), capsys, 60)) <= 60


def test_markup_and_escapes_are_only_shown(capsys: pytest.CaptureFixture[str]) -> None:
    events = {"m0": [told("peer_penalized", peer="m1", reason="[red]\x1b[2J")]}
    text = "\n".join(drawn(crowd(name="[red]", told=events), capsys, 60))
    assert "[red] refuses what peer m1 sent: [red]?[2J" in text and "\x1b" not in text


def test_the_gravest_alerts_and_where_help_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    state = crowd()
    running = Verdict(level="edge", word="at the edge", reason="it goes on", basis=("facts",))
    alerts = tuple(
        Alert(name="x", severity="warning", text=f"text {n} [red]", remedy="do it", basis=("seen",), since=0.0)
        for n in range(5)
    )
    text = "\n".join(drawn(replace(state, verdict=running, alerts=alerts, help_wanted="a peer more"), capsys))
    assert "warning: text 2 [red] -> do it" in text and "text 3" not in text and "and 2 alerts more" in text
    assert "most help: a peer more" in text and "most help" not in "\n".join(drawn(state, capsys))


def test_a_served_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(drawn(model_shown({"a": server(0, 2, sessions=3)}), capsys))
    assert (
        "STOPPED  blocks 2 to 3 have no server" in text and "-> start one with `peer serve INVITE --blocks 2:4`" in text
    )
    assert "server 0" in text


def test_what_a_home_keeps_is_told_as_of_the_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = ended_run()
    home, _ = home_of_a_member(tmp_path / "h", manifest)
    verdict = Verdict(level="unknown", word="not reached", reason="no peer answers", basis=("seen",))
    watch = Watch(started_at=0.0, readings=0, failed=1, last_success=None, reading_s=None, failure="no peer answers")
    state = MonitorState(
        kind="unknown", at=0.0, run_id=manifest.run_id, name="a run", open=False, verdict=verdict, monitor=watch,
        home=kept_home(home, manifest.run_id, time.time()),
    )  # fmt: skip
    lines = drawn(state, capsys)
    assert len(lines) <= 23 and max(map(len, lines)) <= 80 and lines[0].startswith("a run") and "never" in lines[0]
    text = "\n".join(lines)
    assert "NOT REACHED" in text and "No peer answers. The home was last written" in text
    assert "last head: round 3, " in text and "held-out loss 3.250 (round 2)" in text
