"""A round uses the memory of the one before: fresh pages were half of its processor time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.process]

REPO = Path(__file__).parents[2]
FAULTS_MAX = 1000  # a peer and round, after the third: 25 million values in int8 are 6,000 pages for each copy


def test_a_round_maps_few_pages(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--peers", "4", "--params", "25000000", "--bits", "8", "--rounds", "8", "--json", str(figures))
    subprocess.run([sys.executable, "benchmarks/rounds/averaging.py", *options], cwd=REPO, check=True)
    ours = json.loads(figures.read_text())["figures"]["bits"]["8"]["ours"]
    assert ours["identical"] and ours["faults"] < FAULTS_MAX
