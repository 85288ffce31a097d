"""The memory of every `peer` process, which holds a key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = """
import ctypes
import cli.main

def command(**options):
    print(open("/proc/self/limits").read(), "dumpable", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))

cli.main.group.main = command
cli.main.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are read from Linux's /proc")
def test_no_command_leaves_a_core_dump() -> None:
    said = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    core = next(line for line in said.splitlines() if "core file size" in line)
    assert core.split()[4:6] == ["0", "0"] and said.endswith("dumpable 0\n")
