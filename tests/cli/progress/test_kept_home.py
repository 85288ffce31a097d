"""What a home tells of its run where no peer answers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cli.progress import event_tail
from cli.progress.event_tail import EventTail, events_kept
from cli.progress.kept_home import kept_home
from cli.views.kept_home import kept_lines
from swarm.run.home import Home
from tests.cli.support.kept_scene import ANN, BOB, ended_run, home_of, home_of_a_member, last_head
from tests.swarm.run.test_served_model import served_model

HOUR_S = 3600.0


def test_a_home_tells_of_its_run_with_the_age_of_each_fact(tmp_path: Path) -> None:
    manifest = ended_run()
    home, _ = home_of_a_member(tmp_path / "h", manifest)
    kept = kept_home(home, manifest.run_id, time.time() + 2 * HOUR_S)
    assert kept is not None and (kept.kind, kept.name, kept.round, kept.rounds) == ("run", "a run", 3, 3)
    [head] = kept.heads
    assert (head.round, head.head, head.members) == (3, last_head(manifest).hash.hex(), (ANN, BOB))
    assert [(p.round, p.train, p.held_out) for p in kept.losses] == [
        (0, None, 5.5), (1, 4.0, None), (2, 3.0, 3.25), (3, 2.0, None),
    ]  # fmt: skip
    lines = kept_lines(kept, kept.at)
    assert lines[0] == "No peer answers. The home was last written 2 h 0 min ago; it keeps:"
    assert lines[1] == f"a run  run {manifest.run_id}  by invitation"
    assert lines[2] == "round 3 of 3 is committed, the last one"
    assert lines[3].startswith(f"last head: round 3, 2 h 0 min ago, hash {head.head[:8]}, state 07070707, 2.5 M tokens")
    assert lines[4] == f"its members: ann {ANN[-6:]}, {BOB[-6:]}"
    assert lines[5] == "loss 2.000 (round 3), held-out loss 3.250 (round 2)"
    told = {line.split("ago")[1].strip() for line in lines[7:]}
    assert told >= {"complete: round 3, the last one, is committed", "ann is here"}
    assert told >= {f"round {n} committed by 2 members, loss {5 - n:.3f}, state" for n in (1, 2, 3)}
    assert not kept.in_use
    with Home(home).locked():
        running = kept_home(home, manifest.run_id, time.time())
    assert running is not None and running.in_use


def test_a_head_that_the_home_cannot_prove_is_not_shown(tmp_path: Path) -> None:
    manifest = ended_run()
    home, _ = home_of_a_member(tmp_path / "h", manifest, votes=())
    kept = kept_home(home, manifest.run_id, time.time())
    assert kept is not None and kept.heads == () and kept.round is None and kept.losses
    assert "no head: its peer has proved no commit" in kept_lines(kept, kept.at)


def test_a_served_model_and_homes_of_nothing(tmp_path: Path) -> None:
    model = served_model()
    home, _ = home_of(tmp_path / "m", model)
    kept = kept_home(home, model.run_id, time.time())
    assert kept is not None and (kept.kind, kept.heads, kept.written_at) == ("model", (), None)
    lines = kept_lines(kept, kept.at)
    assert len(lines) == 2 and "last written at an unknown time" in lines[0] and "served model" in lines[1]
    assert kept_home(home, "another", 0.0) is None and kept_home(tmp_path / "nothing", model.run_id, 0.0) is None
    (home / "manifest.msgpack").write_bytes(b"damaged")
    assert kept_home(home, model.run_id, 0.0) is None


def test_a_damaged_log_tells_what_is_left_of_it(tmp_path: Path) -> None:
    manifest = ended_run()
    home, _ = home_of_a_member(tmp_path / "h", manifest, name="\x1b[2J[red]")
    log = Home(home).events
    whole = log.read_bytes()
    odd = b'{"at":1e999,"event":"run_completed"}\n{"at":"x","event":"val_evaluated"}\n[]\n{"at":1,"event":'
    os.truncate(home / "agreement" / "records.log", 20)
    log.write_bytes(b"\0" * (3 << 20) + b"\n" + whole + odd)
    kept = kept_home(home, manifest.run_id, time.time())
    assert kept is not None and kept.heads == () and kept.losses[-1].train == 2.0 and kept.written_at is not None
    assert "\x1b" not in "".join(lines := kept_lines(kept, kept.at)) and any(
        "[2J[red] is here" in line for line in lines
    )
    log.unlink()
    os.mkfifo(log)
    assert [*events_kept(home)] == [], "a pipe is not waited for"


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, _ = home_of_a_member(tmp_path / "h", ended_run())
    monkeypatch.setattr(event_tail, "_LOG_BYTES_MAX", 200)
    names = [name for _, name, _ in events_kept(home)]
    assert names and names[-1] == "run_completed" and len(names) < 4


def test_a_line_that_does_not_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (4 << 20))
    tail = EventTail(path)
    assert [*tail.poll()] == [] and len(tail._rest) <= event_tail._CHUNK_BYTES
    with path.open("ab") as log:
        log.write(b'\n{"at":1.0,"event":"late"}\n')
    assert [name for _, name, _ in tail.poll()] == ["late"]
    tail.close()
