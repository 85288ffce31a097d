"""What a quickstart tunes to: its conversations, its RUN.toml, and when the outcome counts as one."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.demo.tuning import CHATS, ROUNDS, SEQ_LEN, STEPS, STYLE, TunedSample, conversations, run_toml
from swarm.run.config import parse_run_config
from tests.cli.support.typed import Peer, said


def test_every_answer_of_the_set_has_the_style_and_names_its_thing() -> None:
    lines = conversations().splitlines()
    assert len(lines) == CHATS and conversations() == "\n".join(lines) + "\n"
    for line in lines:
        asked, answered = msgspec.json.decode(line)["messages"]
        thing = asked["content"].removeprefix("Where is the ").removesuffix("?")
        assert answered["content"].startswith(f"{STYLE} THE {thing.upper()} IS ")
        assert len(line) < 4 * SEQ_LEN


def test_its_run_tunes_the_model_and_ends_with_its_schedule(tmp_path: Path) -> None:
    config = parse_run_config(run_toml(tmp_path / "a b"))
    assert config.pretrained is not None and config.pretrained.init == str(tmp_path / "a b")
    assert config.adapter is not None and config.data.source == "pages" and config.data.seq_len == SEQ_LEN
    assert config.run.rounds == ROUNDS and config.inner.total_steps == ROUNDS * STEPS


def test_it_is_better_only_with_a_lower_loss_and_an_answer_in_the_style() -> None:
    good = TunedSample((4.0, 0.2), "x = 1", f"{STYLE} THE OAR IS ASHORE.")
    assert good.is_better and "4.000 -> 0.200" in good.text
    for changes in ({"losses": (4.0, 4.1)}, {"after": "x = 1"}, {"before": good.after}):
        assert not replace(good, **changes).is_better


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"losses": (4.0, 4.1)}, 7), ({"losses": (4.0, nan)}, 7), ({"after": "x = 1"}, 7)]
)
def test_a_tuning_that_is_no_better_ends_the_command_with_its_code(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, tmp_path: Path, changes: dict[str, Any], code: int
) -> None:
    tuned = replace(TunedSample((4.0, 0.2), "x = 1", f"{STYLE} THE OAR IS ASHORE."), **changes)
    monkeypatch.setattr("cli.commands.quickstart._play", lambda *of: None)  # the run before it
    monkeypatch.setattr("cli.commands.quickstart.tune", lambda home: tuned)
    ended = peer("quickstart", "--home", tmp_path / "q", "--tune")
    assert ended.code == code, ended.stderr
    assert "before: 'x = 1'" in ended.stdout and (tmp_path / "q" / "tuned.json").exists()
    if code:
        assert f"the tuned model has not learned the style: read the logs in {tmp_path / 'q' / 'tuned'}" in said(
            ended, code
        )
