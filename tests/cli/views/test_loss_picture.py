"""The loss curve that a run leaves in its home, and that `peer status --plot` draws."""

from __future__ import annotations

import html
import math
from pathlib import Path

import pytest

from cli.progress.losses import losses_in
from cli.views.loss_picture import PICTURE, draw_home, draw_losses, leave_picture
from peer.errors import ConfigError, ResourceError
from peer.events import EventLog
from peer.plain_text import plain

PNG = b"\x89PNG\r\n\x1a\n"


def home_of_a_peer(home: Path) -> Path:
    log = EventLog(home / "events.jsonl", rotate_bytes=400)
    log.emit("run_entered", name="r", tokenizer="ab12", rounds=9, stages=1)
    log.emit("val_evaluated", round=0, loss=5.5)
    for number in range(1, 4):
        log.emit("round_committed", round=number, loss=math.nan if number == 2 else 5.0 - number)
    log.emit("members_told", round=4, loss=0.5, val_loss=0.7, val_round=3)
    log.close()
    return home


def test_the_losses_are_those_of_all_that_the_log_still_holds(tmp_path: Path) -> None:
    losses = losses_in(home_of_a_peer(tmp_path))
    assert (tmp_path / "events.1.jsonl").exists()
    assert losses.training == {1: 4.0, 3: 2.0, 4: 0.5} and losses.held_out == {0: 5.5, 3: 0.7}
    assert not losses.in_bytes and not losses_in(tmp_path / "nothing")


def test_a_run_leaves_its_curve_in_its_home_once_there_is_one(tmp_path: Path) -> None:
    said = list[str]()
    leave_picture(tmp_path / "empty", said.append)
    assert not (tmp_path / "empty").exists() and not said
    leave_picture(home_of_a_peer(tmp_path), said.append)
    assert (tmp_path / PICTURE).read_bytes()[:8] == PNG and said == [f"The loss curve is in {tmp_path / PICTURE}."]
    (tmp_path / PICTURE).unlink()
    (tmp_path / PICTURE).mkdir()
    leave_picture(tmp_path, said.append)
    assert len(said) == 2 and "was not drawn: cannot write" in said[1]


def test_the_curve_of_several_peers_has_marks(tmp_path: Path) -> None:
    draw_losses(tmp_path / "loss.png", {0: 5.5, 1: 3.0}, {1: 3.1}, {1: "killed"})
    assert (tmp_path / "loss.png").read_bytes()[:8] == PNG


@pytest.mark.parametrize("name", ["my run", "$\\frac{$ <b>&", "语言 🙂 \x1b[31m", "x" * 500])
def test_the_curve_has_the_name_of_its_run(tmp_path: Path, name: str) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("run_entered", name=name, rounds=9, stages=1)
    log.emit("val_evaluated", round=0, loss=5.5)
    log.close()
    losses = losses_in(tmp_path)
    assert losses.run.startswith(name[:100])
    draw_home(losses, tmp_path / "loss.svg")
    drawn = (tmp_path / "loss.svg").read_text()
    assert f"<!-- {html.escape(plain(name, 70), quote=False).replace('--', '- -')} -->" in drawn


def test_a_file_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    losses = losses_in(home_of_a_peer(tmp_path))
    with pytest.raises(ConfigError, match=r"name a file that ends in \.png"):
        draw_home(losses, tmp_path / "loss.txt")
    with pytest.raises(ResourceError, match="name another file"):
        draw_home(losses, tmp_path / "nowhere" / "loss.svg")
