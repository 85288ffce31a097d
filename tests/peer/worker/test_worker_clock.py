"""The idle time that a worker reports, by a clock that only the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peer.ipc.inner_options import InnerRunOptions
from peer.ipc.train_messages import InnerResult, RunEvaluate, RunInner
from peer.worker import train_worker as module
from peer.worker.train_worker import TrainWorker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class AllDone(Exception):
    """Ends the worker after the last command."""


def test_idle_time_since_the_last_inner_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = Clock(), list[Any]()
    inner, evaluate = RunInner(1, [(0, 4)], 0, 60.0, 1, InnerRunOptions(product="gradient")), RunEvaluate(2, 1)
    coming = [(7.0, evaluate), (5.0, inner), (3.0, inner), (2.0, evaluate), (0.0, inner)]

    def get() -> object:
        if not coming:
            raise AllDone
        rest_s, command = coming.pop(0)
        clock.now += rest_s
        return command

    def run_inner(*_: object) -> InnerResult:
        clock.now += 50.0
        return InnerResult(steps=1, sequences=4, tokens=4, loss=1.0, seconds=50.0, skipped=0)

    def run_evaluate(_: object) -> float:
        clock.now += 100.0
        return 1.0

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "run_inner", run_inner)
    worker: Any = TrainWorker.__new__(TrainWorker)
    worker._idle_s, worker._trainer, worker._delta = 0.0, None, ()
    worker._link = SimpleNamespace(
        commands=SimpleNamespace(get=get),
        reply=lambda command, body: sent.append(body),
        ticks=0,
        forget_stops=lambda before_id: None,
    )
    worker._begin = worker._capture = lambda options: None
    worker._evaluate = run_evaluate
    with pytest.raises(AllDone):
        worker.run()
    assert [type(body) for body in sent] == [float, InnerResult, InnerResult, float, InnerResult]
    assert [body.idle_s for body in sent if isinstance(body, InnerResult)] == [12.0, 3.0, 2.0]
