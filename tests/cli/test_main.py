"""The command group: fast help, complete descriptions, and usage errors without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from cli.commands import FIRST, command_summaries
from cli.main import group, main


def test_help_imports_nothing_heavy() -> None:
    probe = """
import json, sys
from cli.main import group
group.main(["--help"], standalone_mode=False)
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert not {"torch", "libp2p", "trio", "msgspec", "rich", "numpy", "swarm"} & set(json.loads(done.stderr))
    assert all(name in done.stdout for name in command_summaries())


def test_every_command_has_its_line_in_the_help() -> None:
    assert list(command_summaries())[: len(FIRST)] == list(FIRST)
    assert all(summary.endswith(".") and len(summary) > 10 for summary in command_summaries().values())


def test_status_does_not_load_torch() -> None:
    probe = "import sys, cli.commands.status, swarm.client.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=120).returncode == 0


@pytest.mark.parametrize("name", command_summaries())
def test_every_command_describes_itself(name: str) -> None:
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output and len(result.output.splitlines()) > 5


def test_every_command_matches_its_module() -> None:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None and command.name == name


@pytest.mark.parametrize(
    "typed", ["jion", "join", "quickstart --peers many", "quickstart --peers 2", "status --nonsense"]
)
def test_usage_errors(typed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["peer", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Usage" in (told := capsys.readouterr().err) and "Traceback" not in told


def test_version() -> None:
    assert "barnraise" in CliRunner().invoke(group, ["--version"]).output
