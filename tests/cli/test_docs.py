"""The documentation names what exists: every command and option, every linked page, every test."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from cli.main import COMMANDS, group

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def section_of(page: str, heading: str) -> str:
    """Return the text below a second-level heading that begins like this."""
    (section,) = re.findall(rf"^## {heading}\b.*?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return str(section)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    options = {
        opt
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
        for opt in (*param.opts, *param.secondary_opts)
    }
    tables = re.findall(r"^\|(.*?)\|", section_of((ROOT / "docs" / "cli.md").read_text(), f"peer {name}"), re.MULTILINE)
    assert {option for cell in tables for option in re.findall(r"`(--[\w-]+)`", cell)} == options - {"--help"}


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    for command in (*(f"peer {name}" for name in COMMANDS), "make quickstart", "make test"):
        assert command in readme, command


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:peer|dht|optim|swarm|cli|tests|benchmarks|docs|tools)/[\w./*-]*)`", page.read_text()):
        assert list(ROOT.glob(name.rstrip("/"))), name
