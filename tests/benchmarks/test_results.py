"""RESULTS.md holds the figures of benchmarks/results, and benchmarks can write those files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.common import options
from benchmarks.common.options import RESULTS
from benchmarks.report import FILE, SECTIONS, report


def test_results_page_is_what_the_files_say() -> None:
    assert FILE.read_text() == report(), "run python benchmarks/report.py"


def test_every_file_has_a_section() -> None:
    assert {file.stem for file in RESULTS.glob("*.json")} <= set(SECTIONS)


def test_a_missing_file_is_left_out(tmp_path: Path) -> None:
    assert "##" not in report(tmp_path)


def test_figures_are_written_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(options.ROOT / "benchmarks" / "network" / "dht.py"), "--nodes", "3"])
    parser = argparse.ArgumentParser()
    options.add_json(parser, "dht")
    file = parser.parse_args(["--json", str(tmp_path / "dht.json")]).json
    assert not file.exists()  # only checked
    options.write_results(file, {"nodes": 3})
    found = json.loads(file.read_text())
    assert found["command"] == "python benchmarks/network/dht.py --nodes 3"
    assert found["figures"] == {"nodes": 3}
    assert all(found[key] for key in ("machine", "commit", "date"))
    assert parser.parse_args(["--json"]).json == RESULTS / "dht.json"
    assert parser.parse_args([]).json is None


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    options.add_json(parser, "dht")
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / "nowhere" / "dht.json")])
    assert "cannot be written" in capsys.readouterr().err
