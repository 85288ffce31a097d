"""Commands that commands print are typed as they stand, from another folder and for another home than the default."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cli.commands.coordinate import _farewell as coordinator_farewell
from cli.commands.join import what_was_kept
from cli.main import group
from cli.progress.progress import Progress
from peer.errors import ConfigError
from peer.figures import quoted
from peer.identity import Identity
from swarm.coordinator.regroup_files import ask_coordinator
from swarm.run.home import Home
from swarm.training.saved_models import _what_is_missing
from tests.cli.support.typed import Peer
from tests.house.source import modules, parsed
from tests.swarm.coordinator.test_successor import made_home

FOLDER = "it's two words"
PRINTED = re.compile(r"`(peer [^`]+)`")


def view_of(home: Path, event: str, **fields: Any) -> str:
    progress = Progress("a view", homes={"p": home})
    entered = {"name": "big", "role": fields.pop("role", "coordinator"), "rounds": 9, "stages": 1, "tokenizer": "bytes"}
    progress.apply("p", "run_entered", 1.0, entered)
    progress.apply("p", event, 2.0, fields)
    return progress.notes[-1]


def kept_by(home: Path, *events: tuple[str, dict[str, Any]]) -> str:
    progress = Progress("a view", homes={"p": home})
    for event, fields in events:
        progress.apply("p", event, 1.0, fields)
    return what_was_kept(progress, home)


def farewell_of(home: Path, complete: bool) -> str:
    progress = Progress("a view")
    progress.apply("p", "run_completed" if complete else "regrouped", 1.0, {"round": 9, "term": 1, "members": 2})
    return coordinator_farewell(progress, home).replace("Restart with: ", "`") + "`"


SAVED = ("checkpoint_saved", {"round": 3, "path": "checkpoints/3"})
FED = ("text_fed", {"micro_batches": 9, "peers": ["x"]})
ADVICE: dict[str, Callable[[Path], str]] = {
    "a lost quorum": lambda home: view_of(home, "quorum_lost", round=4, reason="too few", away=["p"], alone=True),
    "a restored coordinator": lambda home: view_of(home, "coordinator_restored"),
    "a run that is over": lambda home: view_of(
        home, "run_found_complete", role="full", round=9, kept=True, stages=1, common=True
    ),
    "a coordinator that stops": lambda home: farewell_of(home, complete=False),
    "the coordinator of a complete run": lambda home: farewell_of(home, complete=True),
    "a peer that leaves": lambda home: kept_by(home, SAVED),
    "a feeder that leaves": lambda home: kept_by(home, FED),
    "an export without a stage": lambda home: _what_is_missing({home: [0]}, 2),
}


@pytest.mark.parametrize("case", ADVICE)
def test_a_printed_command_names_its_home_from_any_folder(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    Path(FOLDER).mkdir()
    printed = PRINTED.findall(ADVICE[case](Path(FOLDER)))
    assert printed
    monkeypatch.chdir("elsewhere")
    for words in printed:
        context = understood(shlex.split(words))
        homes = context.params["home"] if "home" in context.params else context.params["homes"]
        first = homes[0] if isinstance(homes, tuple) else homes
        assert os.path.samefile(first, tmp_path / FOLDER), words


def understood(words: list[str]) -> click.Context:
    """Return what click makes of a command line, without running it."""
    assert words[0] == "peer"
    with click.Context(group) as outer:
        name, command, rest = group.resolve_command(outer, words[1:])
        assert command is not None
        return command.make_context(name, rest, parent=outer)


def test_a_coordinator_that_does_not_run_is_started_by_the_printed_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir()
    home = made_home(Path(FOLDER))
    with pytest.raises(ConfigError, match="no coordinator runs from") as refused:
        ask_coordinator(home.path)
    (words,) = PRINTED.findall(str(refused.value))
    assert understood(shlex.split(words)).params["home"] == tmp_path / home.path


def test_a_pause_is_ended_by_the_printed_words(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Identity.load_or_create(Home(Path(FOLDER)).identity)
    (words,) = PRINTED.findall(peer("pause", "--home", FOLDER).stdout)
    assert (tmp_path / FOLDER / "paused").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert peer(*shlex.split(words)[1:]).code == 0 and not (tmp_path / FOLDER / "paused").exists()


def test_a_template_is_used_by_the_printed_words(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = peer("coordinate", "--init", "my run.toml").stdout.partition("then: ")[2].strip()
    monkeypatch.chdir("/")
    assert understood(shlex.split(words)).params["run_toml"] == tmp_path / "my run.toml"


def commands_in(tree: ast.AST) -> Iterator[str]:
    """Yield the printed commands of a module, with DIR for what is filled in."""
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        yield from PRINTED.findall(text)


def test_every_command_that_the_program_prints_has_these_options() -> None:
    seen = 0
    for path in modules():
        for words in commands_in(parsed(path)):
            name, *rest = words.split()[1:] or ["-"]
            if name == "help" or name.isupper() or name.startswith("-"):
                continue
            command = group.get_command(click.Context(group), name)
            if isinstance(command, click.Group) and rest and not rest[0].startswith("--"):
                command, rest = command.get_command(click.Context(command), rest[0]), rest[1:]
            assert command is not None, (path, words)
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in rest if word.startswith("--")} <= known | {"--help"}, (path, words)
            seen += 1
    assert seen > 50


def test_a_home_in_a_command_is_told_by_the_home() -> None:
    """Any other way forgets quotes, or the folder in which it holds."""
    for path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr) and path.name != "home.py":
                for part, filled in zip(node.values, node.values[1:], strict=False):
                    composed = isinstance(part, ast.Constant) and str(part.value).endswith("--home ")
                    assert not (composed and isinstance(filled, ast.FormattedValue)), f"{path}: use Home.option"


def test_a_path_is_typed_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shlex.split(quoted(Path(FOLDER))) == [str(tmp_path / FOLDER)]
