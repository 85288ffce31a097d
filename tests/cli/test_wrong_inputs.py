"""Whatever is typed wrongly ends at once with one sentence, a remedy and an exit code that is not a bug's."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from peer.errors import ResourceError
from swarm.run.home import Home
from tests.cli.support.typed import Peer, said
from tests.cli.support.wrong_scene import LONG, invite, lay_out
from tests.cli.support.wrong_sources import WRONG_SOURCES
from tests.cli.support.wrong_values import WRONG_VALUES

WRONG = (*WRONG_SOURCES, *WRONG_VALUES)
EVERY = len(WRONG) // 20


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which it is typed."""
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path / "homes"))
    (tmp_path / "place").mkdir()
    monkeypatch.chdir(tmp_path / "place")
    lay_out(tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        pytest.param(*row, id=row[0], marks=() if number % EVERY == 0 else pytest.mark.soak)
        for number, row in enumerate(WRONG)
    ],
)
def test_wrong_words_end_with_a_remedy(
    peer: Peer, place: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, remedy: str
) -> None:
    with open("/dev/null") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        typed = [word.replace("INVITE", invite()).replace("LONG", LONG) for word in shlex.split(words)]
        sentence = said(peer(*typed), code)
    assert sentence.startswith("peer: ") and ": " in sentence.removeprefix("peer: ") and remedy in sentence
    assert 2 <= code <= 7


def test_the_list_is_long() -> None:
    assert len({words for words, _, _ in WRONG}) == len(WRONG) >= 350


def test_a_home_is_begun_only_where_it_replaces_nothing(place: Path) -> None:
    before = sorted(path.name for path in (place / "others").iterdir())
    refused = pytest.raises(ResourceError, match="holds checkpoints, which one would replace: choose an empty folder")
    with refused, Home(place / "others").locked():
        pass
    assert sorted(path.name for path in (place / "others").iterdir()) == before
    (place / "others" / "identity.key").touch()
    with Home(place / "others").locked():
        pass
