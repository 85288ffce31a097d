"""`make audit` says that a release has no advisories only where the database has said so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import audit

ROOT = Path(__file__).parents[2]
ADVISORY = {"id": "CVE-1", "fix_versions": ["1.0.1"]}


def test_it_asks_for_pins_and_for_lower_bounds() -> None:
    pins = audit.pins((ROOT / "constraints.txt").read_text())
    floors = audit.floors((ROOT / "pyproject.toml").read_text())
    assert any(pin.startswith("starlette==") for pin in pins) and len(pins) > 20
    lowest = dict(floor.split("==") for floor in floors)
    assert {"libp2p", "starlette", "hypercorn", "pyarrow", "bitsandbytes", "tomli"} <= set(lowest)
    assert "pytest" not in lowest and lowest["starlette"] == "1.0.1", "1.0.0 has CVE-2026-48710"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ({"name": "Star_lette", "version": "1.0.0", "vulns": []}, 0, "1 of 1 checked, 0 advisories"),
        ({"name": "star-lette", "version": "1.0.0", "vulns": [ADVISORY]}, 1, "1.0.0: CVE-1, fixed in 1.0.1"),
        ({"name": "star-lette", "skip_reason": "not found"}, 2, "NOT checked, as the database did not answer for them"),
        (None, 2, "NOT checked: this machine is offline"),
    ],
)
def test_what_was_not_checked_is_said(
    answer: Any,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A program in the place of pip-audit, which exits with 0 for what it has skipped, and prints nothing offline."""
    told = "" if answer is None else json.dumps({"dependencies": [answer], "fixes": []})
    (tmp_path / "pip_audit.py").write_text(f"import sys\nprint({told!r})\nsys.exit({int(answer is None)})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert audit.audit("the pins", ["star-lette==1.0.0"]) == code
    assert said in capsys.readouterr().err
