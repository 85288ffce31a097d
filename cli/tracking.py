"""`--track tensorboard|wandb`: a run's curves where people already look at theirs, from a peer's own events.

The service is written to by a thread of its own: one that is slow, or away, loses points and never a round.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import click
import msgspec

from peer.catalogue import rounds
from peer.catalogue.machine import TrackingFailed
from peer.errors import ConfigError
from peer.events import Event, Watcher
from peer.files import write_atomically

WAITING_MAX: Final = 10_000
CLOSE_S: Final = 15.0
"""The service gets so long to take what waits, when the peer ends."""
FAILURES_MAX: Final = 5
"""After so many failures in a row nothing more is sent."""

track_option = click.option(
    "--track",
    type=click.Choice(["tensorboard", "wandb"]),
    help="Write the curves of this peer for TensorBoard (into the home), or to Weights & Biases.",
)

_COMMIT: Final = {
    "seconds": "round/seconds",
    "members": "round/members",
    "contributions": "round/contributions",
    "absent": "round/absent",
    "tokens": "round/tokens",
    "distance": "round/distance",
    "bytes_up": "traffic/up_bytes",
    "bytes_down": "traffic/down_bytes",
}
_TRAINED: Final = {
    "loss": "train/loss",
    "steps": "train/steps",
    "skipped": "train/skipped_steps",
    "overflows": "train/overflows",
}
_CURVES: Final[dict[str, dict[str, str]]] = {  # by event: the curve of each field
    rounds.GossipAlone.event_name(): _COMMIT | _TRAINED,
    rounds.GossipMet.event_name(): _COMMIT | _TRAINED,
    rounds.HeadSeen.event_name(): _COMMIT,
    rounds.InnerStep.event_name(): {"lr": "step/learning_rate", "tokens_per_s": "step/tokens_per_second"},
    rounds.RoundCommitted.event_name(): _COMMIT | _TRAINED,
    rounds.RoundTrained.event_name(): {"busy_s": "train/busy_seconds", "idle_s": "train/idle_seconds"},
    rounds.ValEvaluated.event_name(): {"loss": "held_out/loss"},
}


class Point(msgspec.Struct, frozen=True):
    """Values of curves at one place."""

    axis: str
    """`round`, or `step` for inner steps."""
    number: int
    values: dict[str, float]


def point_of(event: Event) -> Point | None:
    """Return what an event adds to the curves: nothing where it has no number of a round or step."""
    curves = _CURVES.get(event.name)
    axis = "step" if event.name == rounds.InnerStep.event_name() else "round"
    number = event.fields.get(axis)
    if curves is None or not isinstance(number, int):
        return None
    stage = event.fields.get("stage")
    of = "" if stage is None else f"/stage {stage}"
    numbers = ((curve, event.fields.get(field)) for field, curve in curves.items())
    values = {
        f"{curve}{of}": float(value)
        for curve, value in numbers
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    return Point(axis, number, values) if values else None


class Sink(Protocol):
    """A service that keeps curves. It is used by one thread."""

    def write(self, point: Point) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise ConfigError("--track tensorboard needs its package: pip install tensorboard") from None
        try:
            self._writer = Writer(str(folder))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written ({error.strerror}): choose another --home") from error

    def write(self, point: Point) -> None:
        for curve, value in point.values.items():
            self._writer.add_scalar(curve, value, point.number)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases, which the same home continues later; `WANDB_MODE=offline` keeps it in the folder."""

    def __init__(self, folder: Path, run_id: str, name: str) -> None:
        """`run_id` groups the peers of a run there; empty where it is not known yet."""
        try:
            import wandb
        except ImportError:
            raise ConfigError("--track wandb needs its package: pip install wandb") from None
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.api.api_key:
            raise ConfigError("wandb has no key on this machine: run `wandb login`, or set WANDB_MODE=offline")
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, init_timeout=60)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "barnraise"),
                id=_kept_id(folder / "wandb_id"),
                name=name,
                group=run_id or None,
                dir=str(folder),
                resume="allow",
                settings=settings,
            )
        except (wandb.errors.Error, OSError) as error:
            remedy = "set WANDB_MODE=offline, or leave --track out"
            raise ConfigError(f"wandb cannot be reached ({error}): {remedy}") from None
        for axis, curves in (("round", ("train/*", "held_out/*", "round/*", "traffic/*")), ("step", ("step/*",))):
            self._run.define_metric(axis)
            for curve in curves:
                self._run.define_metric(curve, step_metric=axis)

    def write(self, point: Point) -> None:
        self._run.log({point.axis: point.number, **point.values})

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """Return the id of this home's run at the service."""
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode())
    return path.read_text()[:16]


class Tracker:
    """Passes points to a service, in a thread. `on_failure(reason)` is called from there, once."""

    def __init__(self, sink: Sink, on_failure: Callable[[str], None]) -> None:
        self._sink, self._on_failure = sink, on_failure
        self._waiting: queue.Queue[Point | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Take an event, in any thread."""
        point = point_of(event)
        if point is not None:
            try:
                self._waiting.put_nowait(point)
            except queue.Full:
                return  # the service is too slow: this point is lost

    def close(self) -> None:
        """Let the service take what waits, for `CLOSE_S` at most."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        failures = 0
        while (point := self._waiting.get()) is not None:
            if failures >= FAILURES_MAX:
                continue
            try:
                self._sink.write(point)
                failures = 0
            except Exception as error:  # noqa: BLE001 - a tracking service's failure is no failure of the run
                failures += 1
                if failures == FAILURES_MAX:
                    self._on_failure(f"--track gave up: {type(error).__name__}: {error}")
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001
            self._on_failure(f"--track could not end well: {type(error).__name__}: {error}")


@contextmanager
def tracked(kind: str | None, home: Path, run_id: str, name: str, watch: Watcher) -> Iterator[Watcher]:
    """Yield what takes events: `watch`, and the service too. Raises ConfigError where it cannot be opened."""
    if kind is None:
        yield watch
        return

    def failed(reason: str) -> None:
        name, fields = TrackingFailed(reason=reason).stream_form()
        watch(Event(at=time.time(), name=name, fields=fields))

    tracker = Tracker(open_sink(kind, home, run_id, name), failed)

    def take(event: Event) -> None:
        watch(event)
        tracker.take(event)

    try:
        yield take
    finally:
        tracker.close()


def open_sink(kind: str, home: Path, run_id: str, name: str) -> Sink:
    """Return the service of that name."""
    return TensorBoard(home / "tensorboard") if kind == "tensorboard" else WeightsAndBiases(home, run_id, name)
