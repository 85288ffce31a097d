"""`peer quickstart --tune` from end to end, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli.demo.tuning import QUESTION, STYLE, TunedSample
from tests.simulation.histories.checks import check_histories

pytestmark = [pytest.mark.process, pytest.mark.soak]


def test_the_model_of_a_quickstart_learns_a_style(tmp_path: Path) -> None:
    home = tmp_path / "quickstart"
    command = [sys.executable, "-m", "cli.main", "quickstart", "--home", str(home), "--rounds", "6", "--tune"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tuned = msgspec.json.decode((home / "tuned.json").read_bytes(), type=TunedSample)
    before, after = tuned.losses
    assert after < before / 4 and tuned.after.startswith(STYLE) and STYLE not in tuned.before
    assert QUESTION in done.stdout and STYLE in done.stdout
    check_histories([path for path in (home / "tuned").iterdir() if (path / "identity.key").exists()])
