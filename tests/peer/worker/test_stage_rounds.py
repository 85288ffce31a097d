"""What a round needs of a stage's worker process: passes that count or not, captures, certainty when things fail."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
import trio.testing

from peer.errors import StageRefused, WorkerError
from peer.model.layout import init_flat, split_flat
from peer.worker.stage_client import MicroBatch, MicroBatchSlot, StageWorkerGroup
from tests.peer.support.stage_harness import MODEL, open_stages
from tests.peer.support.stage_worker_harness import STAGES, open_worker
from tests.peer.support.worker_harness import freeze, saved_state

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="process supervision is tested through Linux's /proc"),
]
SHAPE = (2, 8)
NEW = split_flat(MODEL, init_flat(MODEL, seed=1), STAGES)[1]


def fill(slot: MicroBatchSlot, seed: int, shape: tuple[int, int] = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a hidden state and targets for the last stage into the slot, and return them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, MODEL.hidden_size, generator=generator)
    targets = torch.randint(0, MODEL.vocab_size, shape, generator=generator)
    slot.hidden(*shape).copy_(hidden)
    slot.targets(*shape).copy_(targets)
    return hidden, targets


async def test_the_worker_equals_a_local_stage(tmp_path: Path) -> None:
    """Every call of a round, bit for bit."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"previous": True, "staleness": 1}
    twin = open_stages(STAGES, **changes)[1]
    async with open_worker(tmp_path, 1, **changes) as (worker_group, _), worker_group.slot() as slot:
        out = torch.empty_like(worker_group.delta)

        async def both(name: str, seed: int, epoch: int, count: bool = True, attempt: int = 0) -> None:
            micro_batch = MicroBatch(name, 1, epoch, count, attempt)
            hidden, targets = fill(slot, seed)
            losses = twin.forward(micro_batch, hidden, targets)
            done = await worker_group.forward(micro_batch, slot, *SHAPE)
            assert torch.equal(slot.losses(*SHAPE), losses) and not done.counted
            fill(slot, seed + 1)
            await worker_group.forward(
                micro_batch, slot, *SHAPE, keep=False
            )  # an evaluation under the same name, meanwhile
            done = await worker_group.backward(micro_batch, slot, *SHAPE)
            assert done.counted == count
            of_input = twin.backward(micro_batch)
            assert of_input is not None and torch.equal(slot.hidden(*SHAPE), of_input)

        await both("a", 0, epoch=0)
        await both("a", 2, epoch=0, count=False, attempt=1)
        assert await worker_group.read_gradient() == twin.read_gradient(out) and torch.equal(worker_group.delta, out)
        await both("b", 4, epoch=0)
        assert (await worker_group.read_gradient()).micro_batches == ("a", "b")
        await worker_group.step(0)
        twin.step(0)
        await worker_group.export(capture=True)
        twin.export(out, worker_group.outer, capture=True)
        assert torch.equal(worker_group.delta, out)
        saved = torch.zeros_like(saved_state(worker_group))
        twin.optimizer.save(saved)
        assert torch.equal(saved_state(worker_group), saved)
        await both("c", 6, epoch=0)
        await worker_group.step(1)
        twin.step(1)
        await both("d", 8, epoch=1)
        worker_group.outer.copy_(NEW)
        assert await worker_group.import_weights(1, rebase=True) == twin.import_weights(NEW, 1, rebase=True)
        await worker_group.export("weights")
        assert torch.equal(worker_group.delta, twin.local) and not torch.equal(twin.local, NEW)
        await both("e", 10, epoch=0, count=False)  # of the weights before
        await both("a", 12, epoch=1)
        assert await worker_group.take_gradient() == twin.take_gradient(out) and torch.equal(worker_group.delta, out)
        assert (await worker_group.read_gradient()).tokens == 0


async def test_a_lost_worker_loses_its_state(tmp_path: Path) -> None:
    async with open_worker(tmp_path, 1) as (worker_group, log), worker_group.slot() as slot:
        for lost in range(2):
            assert worker_group.generation == lost
            fill(slot, 0)
            await worker_group.forward(MicroBatch("a", 1, 0), slot, *SHAPE)
            assert (await worker_group.backward(MicroBatch("a", 1, 0), slot, *SHAPE)).counted
            fill(slot, 0)
            await worker_group.forward(MicroBatch("b", 1, 0), slot, *SHAPE)
            await worker_group.export(capture=True)
            assert worker_group.worker_pid is not None
            freeze(worker_group.worker_pid)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.wait_for, "worker_ready")
                nursery.start_soon(fails, worker_group, slot, lost + 1)
                await trio.testing.wait_all_tasks_blocked()
                os.kill(worker_group.worker_pid, signal.SIGKILL)
            for call in (worker_group.read_gradient, worker_group.take_gradient, worker_group.export):
                with pytest.raises(StageRefused, match="import them first"):
                    await call()
            worker_group.outer.copy_(NEW)
            await worker_group.import_weights(0, rebase=True)  # what was captured is lost: as it stands
            await worker_group.export("weights")
            assert torch.equal(worker_group.delta, NEW)
            assert (await worker_group.read_gradient()).micro_batches == ()
            with pytest.raises(StageRefused, match="send its forward again"):
                await worker_group.backward(MicroBatch("b", 1, 0), slot, *SHAPE)


async def fails(worker_group: StageWorkerGroup, slot: MicroBatchSlot, generation: int) -> None:
    with pytest.raises(WorkerError, match="lost"):
        await worker_group.backward(MicroBatch("b", 1, 0), slot, *SHAPE)
    assert worker_group.generation == generation  # by then


async def test_a_cancelled_backward_counts_only_if_it_returns(tmp_path: Path) -> None:
    """Cancelled at many moments: before the worker begins, while it computes, and not at all."""
    shape = (128, 16)
    async with open_worker(tmp_path, 1, max_tokens=128 * 16) as (worker_group, _), worker_group.slot() as slot:
        counted = []
        for k in range(16):
            fill(slot, k, shape)
            micro_batch = MicroBatch(f"{k}", 1, 0)
            await worker_group.forward(micro_batch, slot, *shape)
            with trio.move_on_after(0.004 * k if k < 15 else math.inf):
                assert (await worker_group.backward(micro_batch, slot, *shape)).counted
                counted.append(micro_batch.id)
            assert not await worker_group.drop(micro_batch)  # counted or gone
        assert counted and (await worker_group.read_gradient()).micro_batches == tuple(counted)


async def test_a_waiting_backward_is_dropped_on_cancellation(tmp_path: Path) -> None:
    async with open_worker(tmp_path, 1) as (worker_group, _), worker_group.slot() as slot:
        fill(slot, 0)
        micro_batch = MicroBatch("a", 1, 0)
        await worker_group.forward(micro_batch, slot, *SHAPE)
        assert worker_group.worker_pid is not None
        freeze(worker_group.worker_pid)
        ended: list[bool] = []

        async def give_up(scope: trio.CancelScope) -> None:
            with scope:
                await worker_group.backward(micro_batch, slot, *SHAPE)
            ended.append(scope.cancelled_caught)

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(give_up, scope)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert not ended  # not reported yet
            os.kill(worker_group.worker_pid, signal.SIGCONT)
        counted = (await worker_group.read_gradient()).micro_batches
        assert ended == [counted == ()]


async def test_a_group_closes_while_its_worker_hangs(tmp_path: Path) -> None:
    """A shielded caller is released."""
    errors: list[str] = []

    async def stubborn(worker_group: StageWorkerGroup, slot: MicroBatchSlot) -> None:
        with trio.CancelScope(shield=True), pytest.raises(WorkerError, match="being closed") as caught:
            await worker_group.forward(MicroBatch("b", 1, 0), slot, *SHAPE)
        errors.append(str(caught.value))
        with trio.CancelScope(shield=True), pytest.raises(WorkerError, match="being closed"):
            await worker_group.read_gradient()

    with trio.fail_after(240.0) as timeout, trio.CancelScope() as everything:
        async with (
            open_worker(tmp_path, 1, silence_s=600.0) as (worker_group, _),
            worker_group.slot() as slot,
            trio.open_nursery() as nursery,
        ):
            fill(slot, 0)
            await worker_group.forward(MicroBatch("a", 1, 0), slot, *SHAPE)
            assert worker_group.worker_pid is not None
            freeze(worker_group.worker_pid)
            nursery.start_soon(worker_group.backward, MicroBatch("a", 1, 0), slot, *SHAPE)
            nursery.start_soon(stubborn, worker_group, slot)
            await trio.testing.wait_all_tasks_blocked()
            timeout.deadline = trio.current_time() + 60.0  # a silent worker is killed after 600 s
            everything.cancel()
    assert everything.cancelled_caught and len(errors) == 1
