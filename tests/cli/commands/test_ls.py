"""`peer ls`: the homes of this machine, and their names in the place of an invite."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.commands.serve import _source
from cli.known_homes import home_meant, known_homes, note_home
from cli.options import read_invite
from peer.errors import ConfigError
from peer.identity import Identity
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import save_run_files
from swarm.run.sections import RunRules
from tests.cli.support.typed import Peer, said
from tests.swarm.run.test_manifest import make_manifest

OWNER = Identity(bytes(32))


def make_home(path: Path, name: str, created_at: int = 1, owns: bool = False, trains: bool = True) -> str:
    """Make the home of a peer in a run of that name, or of its coordinator or a server; return the run's id."""
    path.mkdir(parents=True)
    own = Identity.load_or_create(Home(path).identity)
    owner = own if owns else OWNER
    manifest = make_manifest(owner.peer_id, created_at=created_at, run=RunRules(name=name, open=True))
    save_run_files(path, sign_manifest(owner, manifest), b"")
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{owner.peer_id}"
    if trains:
        Home(path).choices.write_text("{}")
    Home(path).invite.write_text(str(Invite(manifest.run_id, owner.peer_id, (address,))))
    return manifest.run_id


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default place of homes."""
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "root"


def test_homes_here_and_elsewhere_are_listed(root: Path, tmp_path: Path, peer: Peer) -> None:
    assert "There is no home on this machine yet" in peer("ls").stdout
    first = make_home(root / "one", "fables")
    second = make_home(tmp_path / "disk" / "two", "verses", owns=True)
    third = make_home(root / "three", "a very long name " * 3)
    note_home(tmp_path / "disk" / "two")
    note_home(root / "one")
    note_home(tmp_path / "gone")
    (root / "no-home").mkdir()
    (root / "damaged").mkdir()
    (root / "damaged" / "identity.key").write_text("junk")
    with Home(root / "one").locked():
        lines = [json.loads(line) for line in peer("ls", "--json").stdout.splitlines()]
        shown = peer("ls").stdout
    assert [(line["run_id"], line["role"], line["running"]) for line in lines if line["run_id"]] == [
        (second, "coordinator", False),
        (first, "peer", True),
        (third, "peer", False),
    ]
    assert (root / "homes").read_text().splitlines() == [
        json.dumps(str(tmp_path / "disk" / "two")),
        json.dumps(str(tmp_path / "gone")),
    ]
    rows = shown.splitlines()
    assert re.search(r"fables +peer +running +" + first[:8], shown)
    assert rows.index(next(row for row in rows if "fables" in row)) == 3, "what runs comes first"
    assert all(len(row) <= 80 for row in rows)


def test_a_name_or_a_home_stands_for_an_invite(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = make_home(root / "first", "llama-3.1 test")
    text = (root / "first" / "invite").read_text()
    other = make_home(root / "second", "verses", created_at=2)
    for word in ("llama-3.1 test", "first", str(root / "first"), str(root / "first" / "invite"), text):
        assert read_invite(word).run_id == run_id
    (tmp_path / "verses").write_text(text)
    assert read_invite("verses").run_id == run_id, "a file comes before a name"
    (tmp_path / "verses").unlink()
    assert read_invite("verses").run_id == other
    assert _source("verses", None)[0] == read_invite("verses")
    assert (home_meant("verses"), home_meant(str(root / "first"))) == (root / "second", root / "first")
    assert home_meant(text) is None and home_meant("nothing") is None
    with pytest.raises(ConfigError, match="no name that `peer ls` shows"):
        read_invite("nothing")


def test_one_name_of_two_runs_is_refused_with_both_homes(root: Path, peer: Peer) -> None:
    make_home(root / "a", "twin")
    make_home(root / "b", "twin", created_at=2)
    assert "2 runs are called 'twin': give the home in place of the name." in peer("ls").stdout
    for words in (("join", "twin"), ("status", "twin"), ("generate", "twin", "x"), ("export", "twin", "--out", "o")):
        sentence = said(peer(*words), 2)
        assert str(root / "a") in sentence and str(root / "b") in sentence and sentence.endswith("give the home itself")


def test_two_homes_of_one_run_are_one_invite_and_no_home(root: Path) -> None:
    run_id = make_home(root / "a", "one run")
    make_home(root / "b", "one run")
    assert read_invite("one run").run_id == run_id
    with pytest.raises(ConfigError, match=r"names several homes .*: give one of them by --home"):
        home_meant("one run")


def test_a_peer_does_not_train_in_the_home_of_a_server(root: Path, peer: Peer) -> None:
    run_id = make_home(root / "serve-one", "one run", trains=False)
    assert read_invite("one run").run_id == run_id
    assert home_meant("one run") is None and home_meant(str(root / "serve-one")) is None
    make_home(root / "trains", "one run")
    assert home_meant("one run") == root / "trains"
    roles = {json.loads(line)["home"]: json.loads(line)["role"] for line in peer("ls", "--json").stdout.splitlines()}
    assert roles == {str(root / "serve-one"): "server", str(root / "trains"): "peer"}


def test_a_damaged_index_lists_what_it_can(root: Path, tmp_path: Path) -> None:
    make_home(tmp_path / "there", "here")
    root.mkdir()
    (root / "homes").write_bytes(
        b"\xff\n[]\n" + json.dumps("a\0b").encode() + b"\n" + json.dumps(str(tmp_path / "there")).encode()
    )
    assert [home.name for home in known_homes()] == ["here"]
    (root / "homes").unlink()
    (root / "homes").mkdir()
    note_home(tmp_path / "there")
    assert known_homes() == []


def test_the_index_drops_homes_that_are_gone(root: Path, tmp_path: Path) -> None:
    for number in range(230):
        note_home(tmp_path / f"gone-{number}")
    make_home(tmp_path / "there", "here")
    note_home(tmp_path / "there")
    assert len((root / "homes").read_text().splitlines()) <= 200
    assert [home.name for home in known_homes()] == ["here"]
