"""Checks of `peer doctor`: how far a worker process is kept from the rest of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from cli.checks.machine import Finding
from peer.confinement.confine import NOT_HERE, SWITCH, Restriction
from peer.confinement.environment import passed_on
from peer.confinement.probe import REPORT
from peer.files import temporary_folder

_PROBE_S: Final = 60.0
_ROOT: Final = Path(__file__).resolve().parents[2]
_OF_ITS_OWN: Final = "run `peer` as a user of its own"
_REMEDIES: Final = {
    "landlock": f"use Linux 5.13 or newer with Landlock among its security modules, or {_OF_ITS_OWN}",
    "seccomp": f"use Linux with seccomp filters on x86-64 or 64-bit Arm, or {_OF_ITS_OWN}",
}


def confinement_findings() -> Iterator[Finding]:
    """Confine a process as a worker is confined, and report each part."""
    yield environment_finding(os.environ)
    for restriction in _probe():
        yield confinement_finding(restriction)


def environment_finding(environment: Mapping[str, str]) -> Finding:
    """Tell how many of our variables a worker gets."""
    return Finding("environment", "ok", f"{len(passed_on(environment))} of {len(environment)} variables reach a worker")


def confinement_finding(restriction: Restriction) -> Finding:
    """Judge one part. None prevents taking part."""
    name = restriction.name.replace("_", " ")
    if restriction.in_force:
        return Finding(name, "ok", restriction.detail)
    if restriction.detail.startswith(SWITCH):
        return Finding(name, "warning", f"a worker is not confined: {restriction.detail}", f"unset {SWITCH}")
    remedy = (
        _OF_ITS_OWN if restriction.detail == NOT_HERE and sys.platform != "linux" else _REMEDIES.get(name, _OF_ITS_OWN)
    )
    return Finding(name, "warning", restriction.detail, remedy)


def _probe() -> tuple[Restriction, ...]:
    environment = {**passed_on(os.environ), "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"}
    with temporary_folder("barnraise-probe-") as private:
        command = [sys.executable, "-m", "peer.confinement.probe", str(private)]
        try:
            subprocess.run(command, env=environment, capture_output=True, timeout=_PROBE_S, check=True)
            return msgspec.json.decode((private / REPORT).read_bytes(), type=tuple[Restriction, ...])
        except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
            return (Restriction("confinement", False, f"a confined process does not start ({error})"),)
