"""`peer quickstart` from end to end, and that nothing survives it however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE

import msgspec
import psutil
import pytest

from cli.demo.report import Report
from tests.simulation.histories.checks import check_histories
from tests.support.forking.command import peer
from tests.support.forking.forked import ForkedProcess

pytestmark = pytest.mark.process

SHORTER = "tests.support.forking.short_quickstart"


def arguments(home: Path, *options: str) -> tuple[str, ...]:
    return ("quickstart", "--home", str(home), *options)


def start(home: Path, *options: str) -> subprocess.Popen[str]:
    """Start the command, as a user does."""
    command = [sys.executable, "-m", "cli.main", *arguments(home, *options)]
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, stdin=DEVNULL, text=True)


def start_shorter(home: Path, *options: str) -> subprocess.Popen[str]:
    """Start one that is forked, as are its peers, and trains for less."""
    return ForkedProcess(SHORTER, *arguments(home, *options), stdout=PIPE, stderr=PIPE, stdin=DEVNULL, text=True)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_for_peers(process: subprocess.Popen[str], home: Path, name: str) -> None:
    """Until that child has an event stream: it is past its imports and holds sockets and a worker."""
    deadline = time.monotonic() + 300
    while not (home / name / "events.jsonl").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.send_signal(signal.SIGINT)
            raise AssertionError(process.communicate(timeout=300)[1])
        time.sleep(0.1)


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said. It ends its children itself."""
    try:
        return process.communicate(timeout=1000)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        raise AssertionError(process.communicate(timeout=100)[1]) from None


@pytest.mark.parametrize(
    ("shorter", "rounds"), [pytest.param(True, 9, id="shorter"), pytest.param(False, 7, marks=pytest.mark.soak)]
)
def test_a_run_with_a_kill_and_a_join_ends_with_one_state(tmp_path: Path, shorter: bool, rounds: int) -> None:
    """On a busy machine the added peer takes the time of some short rounds to take part."""
    home = tmp_path / "q"
    process = (start_shorter if shorter else start)(home, "--peers", "3", "--rounds", str(rounds), "--monitor")
    out, err = ended(process)
    assert process.returncode == 0, err
    report = msgspec.json.decode((home / "report.json").read_bytes(), type=Report)
    assert report.rounds_committed == rounds and report.broken_invariants == []
    check_histories(folder for folder in home.iterdir() if (folder / "events.jsonl").exists())
    assert report.val_loss_last < min(report.val_loss_first, 3.0)
    assert len(report.peers) == 4 and len(report.killed) == len(report.added) == 1
    killed, added = report.peers[report.killed[0]], report.peers[report.added[0]]
    assert killed["left"] is not None and added["left"] is None and added["joined"] > 0
    stayed = [peer for peer in report.peers.values() if peer["left"] is None]
    assert {peer["state_hash"] for peer in stayed} == {report.state_hash} and len(stayed) == 3
    assert all(peer["bytes_up"] > 0 and peer["bytes_down"] > 0 for peer in stayed)
    assert report.traffic_factor > 50 and report.tokens > 0
    assert (home / "loss.png").stat().st_size > 1000
    assert report.sample in out and "rounds committed" in out
    assert "server-1 serves block" in err and "the answer comes through server-1 and server-2" in err
    check_page(home, out, err, rounds)
    model = tmp_path / "model"
    exported = peer("export", "--home", home / "peer-1", "--out", model)
    assert exported.returncode == 0, exported.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}


def check_page(home: Path, out: str, err: str, rounds: int) -> None:
    """The monitor told its address, and left a page that shows the whole run."""
    page = home / "monitor" / "index.html"
    assert "monitor: http://127.0.0.1:" in err
    assert out.endswith(f"The page of the monitor, which needs no server: {page}\n") and page.exists()
    shown = msgspec.json.decode((page.parent / "data.json").read_bytes())
    assert shown["state"]["verdict"]["level"] == "over"
    assert shown["views"]["all"]["rounds"]["round"] == [float(number) for number in range(1, rounds + 1)]
    assert {"train", "held_out"} <= shown["views"]["all"]["losses"].keys()


@pytest.mark.parametrize(
    "begin", [pytest.param(start_shorter, id="shorter"), pytest.param(start, id="as a user", marks=pytest.mark.soak)]
)
def test_ctrl_c_ends_every_child(tmp_path: Path, begin: Callable[..., subprocess.Popen[str]]) -> None:
    process = begin(tmp_path / "q", "--peers", "3", "--monitor")
    wait_for_peers(process, tmp_path / "q", "peer-3")
    family = descendants(process)
    assert len(family) >= 5
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    gone, alive = psutil.wait_procs(family, timeout=300)
    assert not alive and len(gone) == len(family)


@pytest.mark.soak  # tests/cli/demo/test_child_processes.py has one child
def test_children_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path / "q", "--peers", "3")
    for name in ("coordinator", "peer-1", "peer-2", "peer-3"):  # who is still importing notices later
        wait_for_peers(process, tmp_path / "q", name)
    family = descendants(process)
    process.kill()
    process.communicate(timeout=300)
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive
