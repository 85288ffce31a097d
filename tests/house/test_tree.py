"""CONTRIBUTING.md shows the tree and README.md what machines can do, as they are: tools write both."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from tools import what_fits

ROOT = Path(__file__).parents[2]


def tree_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tree", ROOT / "tools" / "tree.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_in_contributing_is_true() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert tree_tool().updated(page) == page, "run `python tools/tree.py --write`"


def test_what_machines_can_do_in_the_readme_is_true() -> None:
    page = (ROOT / "README.md").read_text()
    assert what_fits.updated(page) == page, "run `python -m tools.what_fits --write`"
    [table] = what_fits.MARKED.findall(page)
    assert len(table.splitlines()) == 2 + len(what_fits.MACHINES) and "| - |" not in table


def test_every_folder_is_described() -> None:
    descriptions = tree_tool().written((ROOT / "CONTRIBUTING.md").read_text())
    assert descriptions and "?" not in descriptions.values()


def test_every_measured_test_file_is_there() -> None:
    measured = json.loads((ROOT / "tests" / "durations.json").read_text())
    assert [name for name in measured if not (ROOT / name).is_file()] == []
