"""A worker that its owner has paused: its process is gone, and what it knew is there when it comes back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import trio

from optim.strategies.interface import RoundInfo
from peer.errors import WorkerError
from peer.worker.client import WorkerGroup
from swarm.protocol.head import Member
from swarm.protocol.plan import Assignment
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.trainers.worker_trainer import WorkerTrainer
from tests.peer.support.worker_harness import HOUR_S, INNER, Log, open_test_worker_group, state_file

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="process supervision is tested through Linux's /proc"),
]
STEPS = 4
MANY = 1_000_000


def request(group: WorkerGroup, number: int, steps: int = STEPS) -> TrainRequest:
    first = number * STEPS * INNER.batch_size
    assignment = Assignment(Member("me", "here"), ((first, first + steps * INNER.batch_size),), steps)
    whole = (slice(0, group.layout.numel),)
    return TrainRequest(assignment, RoundInfo(number, number * STEPS, INNER.lr), whole, 1, HOUR_S)


async def test_a_pause_loses_no_step_and_no_state(tmp_path: Path) -> None:
    """A round after a pause is, bit by bit, what it would have been without. One in which the pause begins is a smaller
    contribution. A peer that starts paused starts no worker."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "text.txt").write_text("".join(f"{line} bottles of beer on the wall.\n" for line in range(2000)))
    async with open_test_worker_group(tmp_path, folder, suspended=True, nice=12) as (group, log):
        trainer = WorkerTrainer(group, "delta", log)
        await trainer.pause()
        assert not group.worker_pids
        await trainer.resume()
        [pid] = group.worker_pids
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 12)

        await trainer.train(request(group, 0))
        learned = state_file(group).read_bytes()
        unpaused = (await trainer.train(request(group, 1))).product.clone()
        result = await _paused_in(trainer, group, log)
        assert 0 < result.steps < MANY and result.samples == result.steps * INNER.batch_size
        assert result.product.any(), "what was done is there without the worker"
        assert not os.path.exists(f"/proc/{pid}") and not group.worker_pids

        assert (await trainer.train(request(group, 1))).steps == 0
        with pytest.raises(WorkerError, match="this machine's owner has paused it"):
            await group.evaluate()
        state_file(group).write_bytes(learned)
        await trainer.resume()
        assert torch.equal((await trainer.train(request(group, 1))).product, unpaused)


async def _paused_in(trainer: WorkerTrainer, group: WorkerGroup, log: Log) -> TrainResult:
    """Pause a trainer in the midst of a round."""
    results = list[TrainResult]()

    async def train() -> None:
        results.append(await trainer.train(request(group, 2, MANY)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(train)
        await log.wait_for("inner_step")
        await trainer.pause()
    return results[0]
