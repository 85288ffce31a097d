"""The averaging benchmark runs, and what it reports of us holds at a small size (times are not tested)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak  # its traffic is bounded
@pytest.mark.process
def test_three_processes_average_to_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["--peers", "3", "--params", "400000", "--rounds", "3", "--bits", "8", "--json", str(file)]
    script = [sys.executable, "benchmarks/rounds/averaging.py", *arguments]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = json.loads(file.read_text())["figures"]["bits"]["8"]["ours"]
    assert ours["identical"]
    assert len(ours["seconds"]) == 2
    assert 1.0 <= ours["of_ideal_wire"] < 1.1
    assert ours["error_all"] < 0.05, "a step of 8 bits, once up and once down"
