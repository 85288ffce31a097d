"""An event of the catalogue is a class: its name is written nowhere else, and the page has the table made from it."""

from __future__ import annotations

import ast
import re
import runpy

from peer.catalogue.reading import CATALOGUE
from tests.house.source import ROOT, modules, parsed

NAMES = re.compile(rf"['\"](?:{'|'.join(CATALOGUE)})['\"]")
"""As a literal: a source without one need not be parsed."""


def test_no_name_of_an_event_is_written_outside_the_catalogue() -> None:
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path in modules()
        if path.parts[:2] != ("peer", "catalogue") and NAMES.search((ROOT / path).read_text())
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in CATALOGUE
    ]
    assert found == [], "use the class: Kind.event_name()"


def test_the_table_of_events_is_true() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "events.py"))
    page = ROOT / "docs" / "run" / "operations.md"
    assert tool["updated"](page.read_text()) == page.read_text(), "run `python tools/events.py --write`"
