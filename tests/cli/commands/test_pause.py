"""`peer pause` and `peer resume`: the file in the home of a peer, and which home that is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from peer.identity import Identity
from swarm.run.home import Home
from swarm.run.owners_pause import read_request
from tests.cli.support.typed import Peer, said
from tests.cli.test_bad_input import invite_to


def test_a_pause_by_the_home(peer: Peer, tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert "is not the home of a peer" in said(peer("pause", "--home", tmp_path), 2)
    Identity.load_or_create(home.identity)
    assert "does not run: it will be paused" in peer("pause", "--home", tmp_path).stdout
    request = read_request(home.paused, time.time())
    assert request is not None and request.until is None
    with home.locked():
        assert "is paused" in peer("pause", "--home", tmp_path, "--for", "90m").stdout
    request = read_request(home.paused, time.time())
    assert request is not None and 5390 < (request.until or 0.0) - time.time() < 5401
    assert "it will train when it is started" in peer("resume", "--home", tmp_path).stdout
    assert not home.paused.exists()
    assert "was not paused" in peer("resume", "--home", tmp_path).stdout
    for text in ("2", "0h", "h", "1w", "-1h", "9" * 30 + "s"):
        assert "is no time: give a number" in said(peer("pause", "--home", tmp_path, f"--for={text}"), 2)


def test_a_pause_of_the_peer_that_runs(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    assert "no peer found in" in said(peer("pause"), 2)
    homes = [Home(tmp_path / name) for name in ("one", "two", "coordinator")]
    for home in homes:
        home.path.mkdir()
        Identity.load_or_create(home.identity)
    assert "2 peers found in" in said(peer("pause"), 2)
    with homes[1].locked():
        assert "two is paused" in peer("pause").stdout
    assert homes[1].paused.exists() and not homes[0].paused.exists()


def test_a_condition_that_is_none(peer: Peer, tmp_path: Path) -> None:
    sentence = said(peer("join", invite_to(1), "--home", tmp_path / "h", "--pause-when", "load:3"), 2)
    assert "--pause-when load:3 is no condition" in sentence and not (tmp_path / "h").exists()
