"""Asks OSV for advisories on the releases that constraints.txt pins, and on the lowest ones that pyproject.toml allows.

    .venv-audit/bin/python tools/audit.py [ROOT]

It exits with 1 if there are any, and with 2 if a release could not be checked: then it knows nothing of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

TIMEOUT_S: Final = 600
_PIN: Final = re.compile(r"^([\w.-]+)==([\w.!+]+)", re.MULTILINE)
_BOUND: Final = re.compile(r'"([A-Za-z][\w-]*)(?:\[[\w,]+\])?[>=]=([\w.!]+)[^"]*"')


def pins(constraints: str) -> list[str]:
    """Return what constraints.txt pins, as NAME==RELEASE."""
    return [f"{name}=={release}" for name, release in _PIN.findall(constraints)]


def floors(project: str) -> list[str]:
    """Return the lowest releases of what users install that pyproject.toml allows, as NAME==RELEASE."""
    start, end = project.index("\ndependencies = ["), project.index("\ndev = [")
    return sorted({f"{name}=={release}" for name, release in _BOUND.findall(project[start:end])})


def ask(wanted: list[str]) -> list[dict[str, Any]] | str:
    """Return what pip-audit says of each release, or why it says nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted))
        file.flush()
        options = ["--vulnerability-service", "osv", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--format", "json", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer within {TIMEOUT_S} s"
    try:
        return list(json.loads(done.stdout)["dependencies"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return (done.stderr.strip().splitlines() or [f"pip-audit exited with {done.returncode} and no word"])[-1]


def audit(what: str, wanted: list[str]) -> int:
    """Say what is known of these releases. Return the exit code."""
    told = ask(wanted)
    if isinstance(told, str):
        say(f"{what} were NOT checked: this machine is offline, or has no way to api.osv.dev. Run it where it has one.")
        say(f"  {told[:300]}")
        return 2
    found = [(one, vuln) for one in told for vuln in one.get("vulns", ())]
    for one, vuln in found:
        fixed = ", ".join(vuln.get("fix_versions", ())) or "no release"
        say(f"{one['name']} {one['version']}: {vuln['id']}, fixed in {fixed}")
    checked = {_plain(one["name"]) for one in told if "skip_reason" not in one}
    missed = [one for one in wanted if _plain(one.partition("==")[0]) not in checked]
    if missed:
        say(f"{what}: NOT checked, as the database did not answer for them: {', '.join(missed)}")
    say(f"{what}: {len(wanted) - len(missed)} of {len(wanted)} checked, {len(found)} advisories")
    return 1 if found else 2 if missed else 0


def say(sentence: str) -> None:
    """Print a line."""
    sys.stderr.write(f"audit: {sentence}\n")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def main(root: Path) -> int:
    """Check both lists."""
    pinned = audit("the pins of constraints.txt", pins((root / "constraints.txt").read_text()))
    lowest = audit("the lower bounds of pyproject.toml", floors((root / "pyproject.toml").read_text()))
    return 1 if 1 in (pinned, lowest) else max(pinned, lowest)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
