"""The newcomer's walk in CONTRIBUTING.md names functions and classes that exist where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house.source import ROOT, parsed

STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", re.MULTILINE)


def steps() -> list[tuple[str, str]]:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (walk,) = re.findall(r"^## A newcomer's walk\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    return STEP.findall(walk)


def defined(body: list[ast.stmt], name: str) -> bool:
    """Whether a class or function of that dotted name is defined in these statements."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == first:
            return not rest or defined(node.body, rest)
    return False


@pytest.mark.parametrize(("path", "name"), steps())
def test_each_step_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file() and defined(parsed(Path(path)).body, name)


def test_there_are_three_ways_of_about_ten_steps() -> None:
    assert 30 <= len(steps()) <= 40
