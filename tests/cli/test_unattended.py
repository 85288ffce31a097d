"""The files for machines that run unattended: the unit starts a command that exists, the image installs what exists."""

from __future__ import annotations

import re
import shlex
import sys
from configparser import RawConfigParser
from pathlib import Path

import click
import pytest

from cli.main import group

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have capitals
    parser.read(ROOT / "tools" / "unattended" / "barnraise.service")
    return parser


def test_the_unit_starts_a_command_with_options_that_exist(unit: RawConfigParser) -> None:
    program, name, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "peer"
    command = group.get_command(click.Context(group), name)
    assert command is not None
    given = command.make_context(name, arguments).params
    place = unit["Service"]["Environment"].removeprefix("BARNRAISE_HOME=")
    assert place == f"/var/lib/{unit['Service']['StateDirectory']}"
    assert given["as_json"] and str(given["home"]).startswith(place) and given["invite"].startswith(place)


def test_the_unit_does_not_try_again_what_cannot_succeed(unit: RawConfigParser) -> None:
    """The exit codes that the documentation gives, less those that time may mend."""
    page = (ROOT / "docs" / "use" / "cli.md").read_text()
    meanings = dict(re.findall(r"^\| (\d) \| ([\w ]+)", page, re.MULTILINE))
    final = {
        code for code, meaning in meanings.items() if meaning.startswith(("usage", "not admitted", "a checkpoint"))
    }
    assert set(unit["Service"]["RestartPreventExitStatus"].split()) == final == {"2", "4", "6"}


def test_the_image_installs_an_extra_that_exists() -> None:
    image = (ROOT / "Dockerfile").read_text()
    (extra,) = re.findall(r"/source\[(\w+)\]", image)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    (program,) = re.findall(r'ENTRYPOINT \["(.*?)"\]', image)
    assert Path(program).name in project["scripts"] and f"python -m venv {Path(program).parents[1]}" in image
