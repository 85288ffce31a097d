"""A peer's home: whose it may be, and what is read from where its author points."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from peer.errors import ConfigError, ResourceError
from swarm.run.config import parse_run_config, read_run_config
from swarm.run.home import Home
from swarm.run.sections import TokenizerConfig
from swarm.run.tokenizer import read_tokenizer
from tests.swarm.run.test_config import GOOD


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Home(tmp_path).locked():
        pass
    stat = Path.stat

    def of_another(path: Path, **options: bool) -> object:
        return SimpleNamespace(st_uid=4711, st_mode=0o040700) if path == tmp_path else stat(path, **options)

    monkeypatch.setattr(Path, "stat", of_another)
    with pytest.raises(ResourceError, match="another user's"), Home(tmp_path).locked():
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResourceError, match="cannot write"), Home(tmp_path).locked():
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_as_the_tokenizer_or_the_file_of_a_run_holds_no_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    run = parse_run_config(GOOD)
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        named = msgspec.structs.replace(run, tokenizer=TokenizerConfig(source=str(source)))
        with pytest.raises(ConfigError, match="regular file"):
            read_tokenizer(named)
    with pytest.raises(ConfigError, match="regular file"):
        read_run_config(tmp_path / "tokenizer.json")
