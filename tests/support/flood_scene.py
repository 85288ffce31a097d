"""A peer under a flood, and an honest caller beside it.

The flooded peer is the coordinator of an open run: a guarded host with a DHT node. Where the machine has two cores,
it shares one with the honest caller, and the flood has the other: only what a flood costs its victim counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.forking.forked import ForkedProcess
from tests.support.ports import free_port
from tests.support.protocol_methods import REPOSITORY

FLOODS: Final = ("handshakes", "streams", "headers", "records", "pushes", "log_lines", "half_open")
FLOOR_S: Final = 0.01
"""A p99 below this is quick, whatever it was before."""
GROWTH_MAX: Final = 64 << 20
FILES_MAX: Final = 10  # more than before
TRIES: Final = 3  # what else runs on this machine may spoil one
BACK_S: Final = 60.0
START_S: Final = 120.0
RUN_TOML: Final = """
[run]
name = "flooded"
open = true
min_peers = 2

[model]
vocab_size = 256
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
intermediate_size = 64
max_seq_len = 64

[data]
seq_len = 64

[inner]
lr = 1e-3
batch_size = 4
total_steps = 100
warmup_steps = 10

[outer]
steps = 10
"""


class Child:
    """A process that answers each line with one of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self.answer() == {"ready": True}

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"a child ended with {self._process.wait(60)}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Scene:
    """The flooded peer, the honest caller and the attackers."""

    victim: psutil.Process
    honest: Child
    floods: Child

    def p99_s(self, seconds: float) -> float:
        measured = self.honest.ask(str(seconds))
        assert not measured["failed"], f"honest calls failed: {measured}"
        return float(measured["p99_s"])

    @property
    def rss(self) -> int:
        return int(self.victim.memory_info().rss)

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for it, `BACK_S` at most."""
        end = time.monotonic() + BACK_S
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


@contextmanager
def running(start: Callable[..., subprocess.Popen[str]], core: int, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process on one core until the block ends."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        process = start(stdin=subprocess.PIPE, stderr=errors, env=environment, text=True)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(process.pid, {cores[core % len(cores)]})
    with suppress(PermissionError):  # what else runs on this machine is no part of the flood
        os.setpriority(os.PRIO_PROCESS, process.pid, -10)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def open_scene(folder: Path) -> Iterator[Scene]:
    """Run the three until the block ends."""
    (folder / "run.toml").write_text(RUN_TOML)
    home, address = folder / "home", f"/ip4/127.0.0.1/tcp/{free_port()}"
    command = [sys.executable, "-m", "cli.main", "coordinate", str(folder / "run.toml")]
    command += ["--home", str(home), "--listen", address]
    with ExitStack() as stack:
        # Not forked: its memory is looked at.
        coordinate = partial(subprocess.Popen, command, stdout=subprocess.DEVNULL)
        victim = stack.enter_context(running(coordinate, core=0, log=folder / "log"))
        end = time.monotonic() + START_S
        while not (home / "invite").exists():
            assert victim.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.05)
        invite = (home / "invite").read_text().strip()
        children = [
            stack.enter_context(
                running(partial(ForkedProcess, module, invite, stdout=subprocess.PIPE), core=core, log=folder / module)
            )
            for core, module in enumerate(("tests.support.honest_caller", "tests.support.floods"))
        ]
        yield Scene(psutil.Process(victim.pid), *map(Child, children))


def endure(scene: Scene, flood: str, flood_s: float) -> float:
    """Assert that honest calls are answered beside a flood, and that memory and files come back. Return the 99th
    percentile of what the calls took."""
    files, rss = scene.victim.num_fds(), scene.rss
    scene.floods.ask(f"begin {flood}")
    beside = scene.p99_s(flood_s)
    sent = scene.floods.ask("fill")["sent_bytes"]
    grown = scene.rss - rss
    scene.floods.ask("end")
    assert sent, "nothing was sent"
    assert grown <= GROWTH_MAX, f"{flood} cost {grown / 1e6:.0f} MB of memory"
    assert scene.until(lambda: scene.rss - rss <= GROWTH_MAX), "memory is not given back"
    assert scene.until(lambda: scene.victim.num_fds() <= files + FILES_MAX), "files stay open"
    print(f"{flood}: p99 {1e3 * beside:.0f} ms, {grown / 1e6:+.0f} MB")  # noqa: T201
    return beside


def check_flood(scene: Scene, flood: str, quiet_s: float, flood_s: float) -> None:
    """Assert besides that honest calls are as quick as before the flood. For a machine that does nothing else."""
    tried = []
    for _ in range(TRIES):
        quiet = scene.p99_s(quiet_s)
        beside = endure(scene, flood, flood_s)
        tried.append((quiet, beside))
        if beside <= max(2 * quiet, FLOOR_S):
            return
    raise AssertionError(f"p99 beside {flood}, in ms: {[(round(1e3 * a), round(1e3 * b)) for a, b in tried]}")
