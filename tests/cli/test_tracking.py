"""`--track`: curves at the services that people already use, read back by the services' own libraries."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from cli import tracking
from cli.tracking import FAILURES_MAX, Point, Tracker, open_sink, point_of, tracked
from peer.errors import ConfigError
from peer.events import Event


def event(name: str, **fields: Any) -> Event:
    return Event(1_800_000_000.0, name, fields)


def test_curves_of_events() -> None:
    committed = event("round_committed", round=3, members=2, loss=1.5, seconds=9.0, state_hash="ab", tokens=100)
    assert point_of(committed) == Point(
        "round", 3, {"round/seconds": 9.0, "round/members": 2.0, "round/tokens": 100.0, "train/loss": 1.5}
    )
    assert point_of(event("head_seen", round=3, members=2, stage=1)) == Point(
        "round", 3, {"round/members/stage 1": 2.0}
    )
    assert point_of(event("inner_step", step=7, lr=1e-3, loss=2.0)) == Point("step", 7, {"step/learning_rate": 1e-3})
    assert point_of(event("val_evaluated", round=2, loss=None)) is None
    assert point_of(event("val_evaluated", round=2, loss=float("nan"))) is None
    assert point_of(event("round_trained", loss=1.0)) is None and point_of(event("worker_died", round=1)) is None


def test_tensorboard_reads_the_curves(tmp_path: Path) -> None:
    seen: list[Event] = []
    with tracked("tensorboard", tmp_path, "run", "ann", seen.append) as watch:
        for number in range(1, 4):
            watch(event("round_committed", round=number, members=2, loss=3.0 / number))
    assert [one.fields["round"] for one in seen] == [1, 2, 3]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["tensors"]) == {"round/members", "train/loss"}
    points = [(one.step, float(make_ndarray(one.tensor_proto))) for one in found.Tensors("train/loss")]
    assert points == [(1, 3.0), (2, 1.5), (3, 1.0)]


def test_wandb_keeps_the_curves_and_goes_on_with_them(tmp_path: Path) -> None:
    """In processes of their own, as it starts a service and handles signals."""
    script = (
        "import sys, pathlib; from cli.tracking import open_sink, Point\n"
        "sink = open_sink('wandb', pathlib.Path(sys.argv[1]), 'run', 'ann')\n"
        "sink.write(Point('round', int(sys.argv[2]), {'train/loss': 1.5})); sink.close()"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for number in "12":
        command = [sys.executable, "-c", script, str(tmp_path), number]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "the same home is the same run"
    assert all(b"train/loss" in file.read_bytes() for file in files)


def test_wandb_without_a_key_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="run `wandb login`, or set WANDB_MODE=offline"):
        open_sink("wandb", tmp_path, "run", "ann")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith(kind):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=f"pip install {kind}"):
        open_sink(kind, tmp_path, "run", "ann")


class Broken:
    """A service that fails."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, point: Point) -> None:
        self.written += 1
        raise RuntimeError("no network")

    def close(self) -> None:
        raise OSError("gone")


def test_a_service_that_fails_is_told_once_and_left() -> None:
    sink, told = Broken(), list[str]()
    tracker = Tracker(sink, told.append)
    for number in range(20):
        tracker.take(event("round_committed", round=number, members=2))
    tracker.close()
    assert sink.written == FAILURES_MAX
    assert told == ["--track gave up: RuntimeError: no network", "--track could not end well: OSError: gone"]


class Hanging(Broken):
    """A service that never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()

    def write(self, point: Point) -> None:
        self.ends.wait()

    def close(self) -> None:
        pass


def test_a_service_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "WAITING_MAX", 8)
    monkeypatch.setattr(tracking, "CLOSE_S", 0.05)
    sink = Hanging()
    tracker = Tracker(sink, lambda reason: None)
    for number in range(100):  # more than wait at once: none of these calls blocks
        tracker.take(event("round_committed", round=number, members=2))
    tracker.close()
    sink.ends.set()


def test_without_the_option_nothing_is_between(tmp_path: Path) -> None:
    seen: list[Event] = []
    with tracked(None, tmp_path, "run", "ann", seen.append) as watch:
        watch(event("round_committed", round=1))
    assert len(seen) == 1 and not list(tmp_path.iterdir())
