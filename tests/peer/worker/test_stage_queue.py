"""The order in which a stage's worker runs its commands."""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.footprint.layout import Layout
from peer.ipc.stage_messages import DropMicroBatch, RunBackward, RunForward, RunStep, StageCommand, TakeGradient
from peer.ipc.stage_spec import MicroBatch
from peer.parallel.ranks import Ranks
from peer.worker.stage_queue import StageQueue, StageTurns, Turn


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


class _Told(Ranks):
    """One of two ranks. The second learns what the first has said before."""

    said: deque[list[float]]

    def sum(self, values: Sequence[float]) -> list[float]:
        if self.rank == 0:
            self.said.append(list(values))
            return list(values)
        return [mine + others for mine, others in zip(values, self.said.popleft(), strict=True)]


@given(st.lists(st.tuples(st.sampled_from("fbtd"), st.sampled_from("xyz")), max_size=30), st.integers())
def test_all_ranks_take_the_turns_of_the_first(kinds: list[tuple[str, str]], seed: int) -> None:
    """Whatever has reached them by then, and in whatever order: drops, which overtake others, as well."""
    rng, told = random.Random(seed), deque[list[float]]()
    commands = [
        DropMicroBatch(id, (name, 0)) if kind == "d" else command(kind, id, name)
        for id, (kind, name) in enumerate(kinds)
    ]
    found: list[list[Turn]] = []
    for rank in range(2):
        ranks = _Told(Layout(replicate=2), rank, torch.device("cpu"))
        object.__setattr__(ranks, "said", told)
        incoming: queue.SimpleQueue[StageCommand] = queue.SimpleQueue()
        turns, coming = StageTurns(incoming, ranks), deque(rng.sample(commands, len(commands)))
        taken: list[Turn] = []
        while len(taken) < len(commands):
            burst = rng.randint(0, len(coming)) if rank == 0 else len(coming)
            if len(coming) - burst + len(taken) == len(commands):
                burst = 1  # all that has come is done: the next turn would wait
            for _ in range(burst):
                incoming.put(coming.popleft())
            taken.append(turns.next())
        found.append(taken)
    assert found[0] == found[1] and sorted(turn.command.id for turn in found[0]) == list(range(len(commands)))
    for turn in found[0]:
        assert not (turn.withdrawn and isinstance(turn.command, TakeGradient))
