"""The page's files: nothing of them is another party's but uPlot, which is as its makers published it."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

PAGE = Path(str(files("swarm.monitor") / "page"))


def test_uplot_is_as_published_and_has_its_license() -> None:
    told = dict(re.findall(r"^([0-9a-f]{64})  (uPlot\S+)$", (PAGE / "uPlot.txt").read_text(), re.M))
    assert sorted(told.values()) == ["uPlot.LICENSE", "uPlot.iife.min.js", "uPlot.min.css"]
    for digest, name in told.items():
        assert hashlib.sha256((PAGE / name).read_bytes()).hexdigest() == digest, name
    assert "The MIT License" in (PAGE / "uPlot.LICENSE").read_text()


def test_the_page_asks_nobody_else_and_runs_from_a_file() -> None:
    """A browser loads no module and fetches nothing from a file; a policy without exceptions allows no inline code."""
    index = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?! defer src=\"[\w.]+\"></script>)", index) == [] and "style=" not in index
    named = set(re.findall(r'(?:src|href)="([^"]+)"', index)) - {"api/v1/state", "metrics"}
    assert named == {path.name for path in PAGE.iterdir()} - {"index.html", "uPlot.txt", "uPlot.LICENSE"}
    for path in PAGE.glob("*.js"):
        if not path.name.startswith("uPlot"):
            text = path.read_text()
            assert "://" not in text and "innerHTML" not in text and not re.search(r"^(import|export) ", text, re.M)


def test_the_kinds_of_knowledge_are_explained_once_and_only_claims_are_marked() -> None:
    index, script = (PAGE / "index.html").read_text(), (PAGE / "monitor.js").read_text()
    assert re.findall(r"<b>(\w+)</b>", index) == ["proved", "seen", "claimed"]
    assert set(re.findall(r'class="(kind [^"]*)"', index)) == {"kind claims"}
    assert set(re.findall(r'"kind [^"]*"|`kind [^`]*`', script)) == {'"kind claims"'}
    charts = re.findall(r"kinds: \[([^\]]*)\]", (PAGE / "charts.js").read_text())
    assert len(charts) == 10 and set(charts) == {"", '"claims"'}
