"""The five packages must come from one folder; a shadowing package is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.packages import PACKAGES, check_packages
from peer.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_our_own_packages_pass() -> None:
    check_packages()


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="package nosuchpackage is missing"):
        check_packages([*PACKAGES, "nosuchpackage"])


def test_a_shadowing_package_is_named_by_both_paths(tmp_path: Path) -> None:
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", "from cli.main import main; main()", "--help"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{tmp_path / 'swarm'} shadows {ROOT / 'swarm'}" in done.stderr
    assert "Traceback" not in done.stderr
