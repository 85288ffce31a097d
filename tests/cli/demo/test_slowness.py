"""A slow peer: its processes stand still for most of the time, and go on when that is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli.demo import slowness
from cli.demo.slowness import slowed

FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
LIMIT_S = 60.0


def await_state(processes: list[psutil.Process], stopped: bool) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any((process.status() == psutil.STATUS_STOPPED) is not stopped for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_and_its_worker_are_stopped_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "RUNS_S", 0.1)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        family = [psutil.Process(process.pid), psutil.Process(int(process.stdout.readline()))]
        with slowed(process.pid):
            for stopped in (True, False, True):
                await_state(family, stopped)
        assert not [one for one in family if one.status() == psutil.STATUS_STOPPED]
        process.stdin.close()
    assert process.returncode == 0


def test_one_that_has_ended_is_left_alone() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    slowness._signal([ended.pid], signal.SIGSTOP)


def test_without_ps_the_peer_alone_is_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slowness._descendants(os.getpid()) == []
