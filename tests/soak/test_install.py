"""The installation into an empty environment, as the image does it, and a quickstart in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_empty_environment_becomes_a_working_peer(tmp_path: Path) -> None:
    source, made, elsewhere = tmp_path / "source", tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run("git", "clone", "--quiet", ROOT, source, folder=tmp_path)
    run(sys.executable, "-m", "venv", made, folder=tmp_path)
    pip = (made / "bin" / "pip", "install", "--quiet")
    run(*pip, f"{source}[all]", "--constraint", source / "constraints.txt", folder=elsewhere)
    peer = made / "bin" / "peer"
    assert "0." in run(peer, "--version", folder=elsewhere)
    assert "This machine can take part." in run(peer, "doctor", folder=elsewhere)
    run(peer, "coordinate", "--init", "run.toml", folder=elsewhere)  # a file that comes with the package
    assert "[model]" in (elsewhere / "run.toml").read_text()
    told = run(peer, "quickstart", "--rounds", "6", folder=elsewhere)
    assert "6 rounds committed" in told and (elsewhere / "quickstart" / "loss.png").is_file()
