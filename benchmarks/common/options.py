"""The options that all benchmarks share, and the file that a benchmark's figures go to."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_LOAD = os.getloadavg()[0]  # before anything is measured


def add_json(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `--json [FILE]`: without FILE the figures go to benchmarks/results/NAME.json, which `report.py` reads."""
    parser.add_argument(
        "--json",
        type=writable,
        nargs="?",
        const=str(RESULTS / f"{name}.json"),
        metavar="FILE",
        help=f"write the figures to this file (without FILE: benchmarks/results/{name}.json)",
    )


def writable(text: str) -> Path:
    """Return the path of a file that can be written, so that no measurement is lost at its end."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror}): choose another file") from error
    if not existed:
        path.unlink()
    return path


def write_results(path: Path, figures: Any) -> None:
    """Write the figures with the command, machine, commit and date that they belong to."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    head = {
        "command": shlex.join(["python", str(name), *sys.argv[1:]]),
        "machine": machine(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    whole = path.with_name(path.name + ".new")  # a benchmark that is ended keeps the figures it had
    whole.write_text(json.dumps({**head, "figures": figures}, indent=1) + "\n")
    whole.replace(path)


def machine() -> str:
    """Describe this machine in one line."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        f"{os.cpu_count()} {platform.machine()} cores",
        f"{memory_gib:.0f} GiB",
        f"Python {'.'.join(platform.python_version_tuple()[:2])}",
        f"torch {version('torch')}",
        f"load {_LOAD:.1f} at the start",
    ]
    return ", ".join(parts)


def commit() -> str:
    """Return the short hash of the commit, with "+changes" if files differ from it."""
    try:
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+changes"]
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
