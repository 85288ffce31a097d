"""`peer coordinate --make-successor` and `--successor` at the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from nacl.pwhash import argon2id

from cli.commands.coordinate import coordinate
from peer.errors import ConfigError
from peer.identity import Identity
from swarm.coordinator import successor
from swarm.run.home import Home
from tests.swarm.coordinator.test_successor import WORDS, made_home


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least work for a guess that the library allows."""
    monkeypatch.setattr(successor, "_OPS", argon2id.OPSLIMIT_MIN)
    monkeypatch.setattr(successor, "_MEMORY", argon2id.MEMLIMIT_MIN)


def run(*words: object, stdin: str = f"{WORDS}\n") -> str:
    found = CliRunner().invoke(coordinate, list(map(str, words)), input=stdin)
    if found.exception is not None:
        raise found.exception
    return found.output


def test_the_file_is_made_and_opened_by_a_line_of_standard_input(tmp_path: Path) -> None:
    home, file = made_home(tmp_path), tmp_path / "kept.json"
    assert f"peer coordinate --successor {file}" in run("--make-successor", file, "--home", home.path)
    heir = successor.open_successor(file, WORDS)
    assert heir.identity.peer_id == Identity.load_or_create(home.identity).peer_id


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    home, file, new = made_home(tmp_path), tmp_path / "kept.json", tmp_path / "new"
    for words in ("", "\n", "short\n"):
        with pytest.raises(ConfigError, match="8 characters"):
            run("--make-successor", file, "--home", home.path, stdin=words)
    assert not file.exists()
    with pytest.raises(ConfigError, match="is no successor's file"):
        run("--successor", home.invite, "--home", new)
    run("--make-successor", file, "--home", home.path)
    with pytest.raises(ConfigError, match="does not open"):
        run("--successor", file, "--home", new, stdin="another passphrase\n")
    assert not Home(new).identity.exists()
    (tmp_path / "run.toml").write_text((Path("cli") / "templates" / "run.toml").read_text())
    with pytest.raises(ConfigError, match=r"leave RUN\.toml out"):
        run(tmp_path / "run.toml", "--successor", file, "--home", new)
