"""`tools/install.py` tells how far an installation is, keeps warnings of others to itself, and says why it failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import Follower

TOOL = Path(__file__).parents[2] / "tools" / "install.py"
PIP = """\
WARNING: Location 'file:///nowhere/' is ignored: it is neither a file nor a directory.
Collecting torch==2.13.0 (from barnraise==0.1.0)
  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (180.1 MB)
Collecting click>=8.1
  Building wheel for fastecdsa (pyproject.toml): started
  BuildBackendWarning: Editable installation.
Installing collected packages: click, torch, fastecdsa
"""


def test_it_tells_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for lines, told in (
        (3, "1 packages found; downloads torch-2.13.0, 180.1 MB"),
        (5, "2 packages found; builds fastecdsa"),
        (7, "0 of 3 packages are in place; installs"),
    ):
        follower = Follower(said_every_s=0.0)
        for line in PIP.splitlines(keepends=True)[:lines]:
            follower.take(line)
        follower.show()
        shown = capsys.readouterr().err
        assert shown.startswith("set-up: ") and shown.endswith(f"{told}\n") and len(shown) <= 80
    follower.end(is_done=True)
    assert capsys.readouterr().err.startswith("set-up: packages installed: 3, in ")


def test_it_says_why_it_failed() -> None:
    command = [sys.executable, str(TOOL), "--no-index", "--dry-run", "no-such-package-anywhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No matching distribution found for no-such-package-anywhere" in done.stderr
    assert done.stderr.endswith("set-up: pip failed; its last lines are above\n")
