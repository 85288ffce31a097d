"""The command group: fast help, complete descriptions, and usage errors without tracebacks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from cli.commands import FIRST, command_summaries
from cli.examples import EXAMPLES
from cli.main import group
from tests.cli.support.typed import Peer


def test_help_imports_nothing_heavy() -> None:
    probe = """
import json, sys
from cli.main import group
group.main(["--help"], standalone_mode=False)
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    heavy = {"torch", "libp2p", "trio", "msgspec", "rich", "prompt_toolkit", "numpy", "swarm"}
    assert not heavy & set(json.loads(done.stderr))
    assert all(name in done.stdout for name in command_summaries())


def test_every_command_has_its_line_in_the_help() -> None:
    assert list(command_summaries())[: len(FIRST)] == list(FIRST)
    assert all(summary.endswith(".") and len(summary) > 10 for summary in command_summaries().values())


def test_status_does_not_load_torch() -> None:
    probe = "import sys, cli.commands.status, swarm.status.reading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=120).returncode == 0


def test_no_commands_help_imports_what_takes_seconds() -> None:
    probe = """
import importlib, sys
from cli.commands import command_summaries
for name in command_summaries():
    importlib.import_module(f"cli.commands.{name}")
    assert not {"torch", "libp2p", "transformers"} & set(sys.modules), name
"""
    done = subprocess.run([sys.executable, "-c", probe], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", command_summaries())
def test_every_command_describes_itself(name: str) -> None:
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output and len(result.output.splitlines()) > 5


@pytest.mark.parametrize("words", [(), ("help",), ("--help",)])
def test_without_a_command_the_help_is_shown(peer: Peer, words: tuple[str, ...]) -> None:
    ended = peer(*words)
    assert (ended.code, ended.stderr) == (0, "") and ended.stdout == peer("-h").stdout
    assert ended.stdout.startswith("Usage: peer") and all(name in ended.stdout for name in command_summaries())
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_help_names_a_command(peer: Peer) -> None:
    assert peer("help", "join") == peer("join", "--help")
    assert peer("help", "jion").stderr == peer("jion").stderr
    assert peer("help", "join", "now").code == 2


@pytest.mark.parametrize("name", command_summaries())
def test_every_command_has_two_examples_that_it_takes(name: str, peer: Peer) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None and len(EXAMPLES[name]) >= 2
    shown = peer(name, "--help").stdout
    for what, words in EXAMPLES[name]:
        assert f"\n    {words}\n        {what}\n" in shown and len(words) <= 76 and len(what) <= 72
        program, command_name, *rest = shlex.split(words)
        assert (program, command_name) == ("peer", name)
        command.make_parser(click.Context(command)).parse_args(rest)


def test_words_are_completed() -> None:
    found = ShellComplete(group, {}, "peer", "_PEER_COMPLETE")
    assert [item.value for item in found.get_completions([], "jo")] == ["join"]
    assert "--text-field" in [item.value for item in found.get_completions(["join"], "--te")]


def test_every_command_matches_its_module() -> None:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None and command.name == name


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("jion", "`peer` has no command jion: write `peer join`, or see `peer --help`"),
        ("xyzzy", "`peer` has no command xyzzy: see `peer --help`"),
        ("export x", "`peer export` was given no --out: add it, see `peer export --help`"),
        ("quickstart --peers many", "--peers 'many' is no whole number: see `peer quickstart --help`"),
        ("relay --rate much", "--rate 'much' is no number: see `peer relay --help`"),
        (
            'doctor --text-field a"b',
            "--text-field 'a\"b' names no field: give 1 to 128 printable letters, without quote or backslash",
        ),
        ("quickstart --peers 2", "--peers 2 is not in the range 3<=x<=16: choose a number in it"),
        ("status --nonsense", "`peer status` has no option --nonsense: see `peer status --help`"),
        ("join x --hom y", "`peer join` has no option --hom: write --home, or see `peer join --help`"),
        ("join x --role feder", "--role 'feder' is not one of 'auto', 'full', 'stage', 'feeder': write feeder"),
        ("join x --role boss", "--role 'boss' is not one of 'auto', 'full', 'stage', 'feeder': choose one of these"),
        ("export --home", "option '--home' requires an argument: write its value after it, see `peer --help`"),
        ("relay too many", "got unexpected extra arguments (too many): see `peer relay --help`"),
    ],
)
def test_usage_errors_end_with_what_to_do(peer: Peer, typed: str, sentence: str) -> None:
    ended = peer(*typed.split())
    assert (ended.code, ended.stderr) == (2, f"peer: {sentence}\n")


def test_version() -> None:
    assert "barnraise" in CliRunner().invoke(group, ["--version"]).output
