"""The order in which a stage's worker runs its commands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.ipc.stage_messages import RunBackward, RunForward, RunStep, StageCommand, TakeGradient
from peer.ipc.stage_spec import MicroBatch
from peer.worker.stage_queue import StageQueue


def command(kind: str, id: int, name: str = "m") -> StageCommand:
    micro_batch = MicroBatch(name, 0, 0)
    if kind == "f":
        return RunForward(id, micro_batch, 0, 1, 1, True)
    return RunBackward(id, micro_batch, 0, 1, 1) if kind == "b" else TakeGradient(id, True)


@given(st.text("fbt", max_size=30))
def test_backwards_first_within_each_section(kinds: str) -> None:
    waiting = StageQueue()
    for id, kind in enumerate(kinds):
        waiting.push(command(kind, id))
    wanted: list[int] = []
    at = 0
    for section in kinds.split("t"):
        ids = range(at, at + len(section))
        wanted += [id for id in ids if kinds[id] == "b"] + [id for id in ids if kinds[id] == "f"]
        at += len(section) + 1
        wanted += [at - 1] if at <= len(kinds) else []
    assert [waiting.pop().id for _ in range(len(waiting))] == wanted
    with pytest.raises(IndexError):
        waiting.pop()


def test_withdraw() -> None:
    waiting = StageQueue()
    for id, (kind, name) in enumerate([("f", "a"), ("f", "b"), ("b", "c"), ("b", "a"), ("t", ""), ("f", "a")]):
        waiting.push(command(kind, id, name))
    assert sorted(found.id for found in waiting.withdraw(("a", 0))) == [0, 3, 5]
    assert waiting.withdraw(("a", 0)) == []
    assert [waiting.pop().id for _ in range(len(waiting))] == [2, 1, 4]


def test_an_evaluation_and_another_attempt_are_not_withdrawn() -> None:
    waiting = StageQueue()
    waiting.push(RunForward(0, MicroBatch("a", 0, 0), 0, 1, 1, keep=False))
    waiting.push(RunForward(1, MicroBatch("a", 0, 0, attempt=1), 0, 1, 1, keep=True))
    assert waiting.withdraw(("a", 0)) == []
    assert [found.id for found in waiting.withdraw(("a", 1))] == [1] and len(waiting) == 1


def test_a_step_goes_first_within_its_section() -> None:
    waiting = StageQueue()
    for id, kind in enumerate("tbf"):
        waiting.push(command(kind, id))
    waiting.push(RunStep(3, 0))
    waiting.push(command("t", 4))
    waiting.push(command("b", 5))
    assert [waiting.pop().id for _ in range(6)] == [0, 3, 1, 2, 4, 5]
