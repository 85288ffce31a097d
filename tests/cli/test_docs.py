"""The documentation names what exists: every command and option, every linked page, every test."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from cli.commands import command_summaries
from cli.main import group

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def section_of(page: str, heading: str) -> str:
    """Return the text below a second-level heading that begins like this."""
    (section,) = re.findall(rf"^## {heading}\b.*?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return str(section)


@pytest.mark.parametrize("name", command_summaries())
def test_every_option_is_documented(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    options = {
        opt
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
        for opt in (*param.opts, *param.secondary_opts)
    }
    section = section_of((ROOT / "docs" / "use" / "cli.md").read_text(), f"peer {name}")
    tables = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)
    assert {option for cell in tables for option in re.findall(r"`(--[\w-]+)`", cell)} == options - {"--help"}


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    for command in (*(f"peer {name}" for name in command_summaries()), "make quickstart", "make test"):
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
        if not re.match(r"dht/\w+$", name):  # a method
            assert list(ROOT.glob(name.rstrip("/"))), name


def test_the_protocol_page_names_the_methods_of_the_code() -> None:
    page = (ROOT / "docs" / "internals" / "protocol.md").read_text()
    rooms = "authority|backup|dht|exchange|gossip|net|pipeline|round|run|state"
    sources = [path.read_text() for package in ("peer", "dht", "swarm") for path in (ROOT / package).rglob("*.py")]
    code = {name for text in sources for name in re.findall(rf'Method\(\s*"((?:{rooms})[./]\w+)"', text)}
    named = set(re.findall(rf"`((?:{rooms})[./](?:\w+|\*))`", page)) - {
        "pipeline.micro_batch",
        "state.part",
        "backup.part",
    }
    whole = {name[:-1] for name in named if name.endswith("*")}
    assert {name for name in named if not name.endswith("*")} <= code
    assert not {name for name in code - named if not name.startswith(tuple(whole))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """A file of tests, and the words in backticks after it on the same line, up to the next file."""
    for line in page.read_text().splitlines():
        for path, words in re.findall(r"`(tests/[\w/]+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", line):
            text = (ROOT / path).read_text()
            for word in re.findall(r"`(\w+)`", words):
                assert word in text, f"{path} has no test {word}"
