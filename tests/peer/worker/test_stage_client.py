"""Stages in real worker processes: equal to the whole model; supervised; many micro-batches in flight."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import trio
import trio.testing
from torch import Tensor

from peer.errors import ConfigError, StageRefused, WorkerError
from peer.events import Event
from peer.footprint.layout import Layout
from peer.model.layout import init_flat, join_flat
from peer.worker.stage_client import MicroBatch, MicroBatchSlot, StageWorkerGroup
from tests.peer.support.stage_harness import MODEL, relative, token_batches, whole_gradient
from tests.peer.support.stage_worker_harness import STAGES, free_slots, is_idle, open_worker
from tests.peer.support.worker_harness import freeze

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="process supervision is tested through Linux's /proc"),
]


async def through(
    first: StageWorkerGroup, last: StageWorkerGroup, name: str, tokens: Tensor, losses: list[float]
) -> None:
    """One micro-batch forward and back, as over the network."""
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    rows, columns = ids.shape
    at = rows, columns
    async with first.slot() as near:
        near.tokens(*at).copy_(ids)
        await first.forward(MicroBatch(name, 0, 0), near, *at)
        async with last.slot() as far:
            far.hidden(*at).copy_(near.hidden(*at))
            far.targets(*at).copy_(targets)
            done = await last.forward(MicroBatch(name, 1, 0), far, *at)
            assert done.loss is not None and done.seconds > 0
            losses.append(float(far.losses(*at).sum()))
            await last.backward(MicroBatch(name, 1, 0), far, *at)
            near.hidden(*at).copy_(far.hidden(*at))
        await first.backward(MicroBatch(name, 0, 0), near, *at)


async def test_two_worker_processes_equal_the_model(tmp_path: Path) -> None:
    """Ten micro-batches over three slots, all started at once."""
    batches = token_batches(10)
    exact_loss, exact = whole_gradient(MODEL, init_flat(MODEL, seed=0), batches)
    tokens = sum(batch[:, 1:].numel() for batch in batches)
    losses: list[float] = []
    async with open_worker(tmp_path, 0, slots=3) as (first, _), open_worker(tmp_path, 1, slots=3) as (last, _):
        async with trio.open_nursery() as nursery:
            for k, batch in enumerate(batches):
                nursery.start_soon(through, first, last, str(k), batch, losses)
        assert abs(sum(losses) / tokens - exact_loss) < 1e-5 * exact_loss
        assert is_idle(first) and is_idle(last) and free_slots(first) == 3
        for worker_group in (first, last):
            taken = await worker_group.take_gradient()
            assert sorted(taken.micro_batches) == sorted(map(str, range(10))) and taken.tokens == tokens
            assert taken.norm == pytest.approx(float(worker_group.delta.norm()), rel=1e-5)
        merged = join_flat(MODEL, [first.delta, last.delta], STAGES)
        assert relative(merged, exact) < 1e-5


async def test_two_ranks_share_a_stage(tmp_path: Path) -> None:
    """Micro-batches of 1 to 4 rows, all started at once, so that commands reach the ranks in the midst of others.
    A rank that is lost takes the group along, and the next one begins as any new worker does."""
    batches = token_batches(10)
    losses: list[float] = []
    flat = init_flat(MODEL, seed=0)
    async with (
        open_worker(tmp_path, 0, slots=3) as (first, _),
        open_worker(tmp_path, 1, slots=3, ranks=Layout(replicate=2)) as (last, log),
    ):
        weights = last.outer.clone()
        for count in (10, 3):
            async with trio.open_nursery() as nursery:
                for k, batch in enumerate(batches[:count]):
                    nursery.start_soon(through, first, last, str(k), batch, losses)
            assert is_idle(last)
            taken, _ = await last.take_gradient(), await first.take_gradient()
            _, exact = whole_gradient(MODEL, flat, batches[:count])
            assert len(taken.micro_batches) == count
            assert relative(join_flat(MODEL, [first.delta, last.delta], STAGES), exact) < 1e-5
            assert taken.norm == pytest.approx(float(last.delta.norm()), rel=1e-5)
            await last.export("weights")
            assert torch.equal(last.delta, weights)
            if count == 10:
                async with last.slot() as slot, trio.open_nursery() as nursery:
                    slot.hidden(2, 8).fill_(0.5)
                    slot.targets(2, 8).fill_(1)
                    await last.forward(MicroBatch("lost", 1, 0), slot, 2, 8)
                    freeze(last.worker_pids[1])
                    nursery.start_soon(fails, last, slot)
                    nursery.start_soon(log.wait_for, "worker_ready")
                    await trio.testing.wait_all_tasks_blocked()
                    os.kill(last.worker_pids[1], signal.SIGKILL)
                with pytest.raises(StageRefused, match="import them first"):
                    await last.read_gradient()
                await last.import_weights(epoch=0)
                await first.import_weights(epoch=0)  # what it has counted may count again


async def fails(worker_group: StageWorkerGroup, slot: MicroBatchSlot) -> None:
    with pytest.raises(WorkerError, match="lost"):
        await worker_group.backward(MicroBatch("lost", 1, 0), slot, 2, 8)


async def test_refusals_reach_the_caller(tmp_path: Path) -> None:
    async with open_worker(tmp_path, 1) as (worker_group, _), worker_group.slot() as slot:
        micro_batch = MicroBatch("a", 1, 0)
        slot.hidden(2, 8).fill_(torch.nan)
        slot.targets(2, 8).fill_(1)
        for bad, reason in (
            (micro_batch, "not_finite"),
            (MicroBatch("a", 0, 0), "stage"),
            (MicroBatch("a", 1, 3), "epoch"),
        ):
            with pytest.raises(StageRefused) as caught:
                await worker_group.forward(bad, slot, 2, 8)
            assert caught.value.reason == reason
        with pytest.raises(StageRefused, match="takes 1 to 64 tokens"):
            await worker_group.forward(micro_batch, slot, 5, 16)  # it does not fit into a slot, so it is not sent
        with pytest.raises(StageRefused, match="no micro-batch was counted"):
            await worker_group.step(0)
        slot.hidden(2, 8).fill_(0.5)
        await worker_group.forward(micro_batch, slot, 2, 8)
        with pytest.raises(StageRefused, match="counts once"):
            await worker_group.forward(micro_batch, slot, 2, 8)
        await worker_group.backward(micro_batch, slot, 2, 8)
        with pytest.raises(StageRefused, match="send its forward again"):
            await worker_group.backward(micro_batch, slot, 2, 8)
        assert (await worker_group.take_gradient()).micro_batches == ("a",)


async def test_waiting_micro_batches_can_be_dropped(tmp_path: Path) -> None:
    """The worker is stopped meanwhile, so that all commands wait in its queue."""
    async with open_worker(tmp_path, 0) as (worker_group, _):
        done: list[str] = []

        async def run(kind: str, name: str) -> None:
            async with worker_group.slot() as slot:
                slot.tokens(2, 8).fill_(1)
                slot.hidden(2, 8).fill_(1.0) if kind == "b" else None
                call = worker_group.backward if kind == "b" else worker_group.forward
                try:
                    await call(MicroBatch(name, 0, 0), slot, 2, 8)
                    done.append(kind + name)
                except StageRefused as refused:
                    done.append(f"{kind}{name} {refused.reason}")

        for name in "ab":
            await run("f", name)
        assert worker_group.worker_pid is not None
        freeze(worker_group.worker_pid)
        gave_up = trio.CancelScope()

        async def give_up() -> None:
            with gave_up:
                await run("f", "e")

        async with trio.open_nursery() as nursery:
            for kind, name in (
                ("f", "z"),
                ("f", "c"),
                ("f", "d"),
                ("b", "a"),
                ("b", "b"),
            ):  # the others arrive during "z"
                nursery.start_soon(run, kind, name)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(give_up)
            nursery.start_soon(worker_group.drop, MicroBatch("d", 0, 0))
            await trio.testing.wait_all_tasks_blocked()
            gave_up.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert (
                gave_up.cancelled_caught and free_slots(worker_group) == 8 - 6
            )  # the worker may yet write into the sixth
            os.kill(worker_group.worker_pid, signal.SIGCONT)
        # replies that were read at once wake their callers in any order: `micro_batches` below has the backwards' order
        assert sorted(done[2:]) == ["ba", "bb", "fc", "fd cancelled", "fz"]
        assert not await worker_group.drop(MicroBatch("e", 0, 0))  # it was dropped as it was given up
        assert await worker_group.drop(MicroBatch("c", 0, 0))
        assert is_idle(worker_group)
        assert (await worker_group.take_gradient()).micro_batches == ("a", "b")


async def test_a_killed_and_a_frozen_worker_are_replaced(tmp_path: Path) -> None:
    """Commands in flight fail, their slots are freed, and the new worker waits for weights."""
    async with open_worker(tmp_path, 1, silence_s=8.0) as (worker_group, log):
        for fatal, words in ((signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "silent for 8 s")):
            errors: list[str] = []

            async def compute(name: str) -> None:
                async with worker_group.slot() as slot:
                    slot.hidden(2, 8).fill_(0.5)
                    slot.targets(2, 8).fill_(1)
                    with pytest.raises(WorkerError) as caught:
                        while True:
                            await worker_group.forward(MicroBatch(name, 1, 0), slot, 2, 8, keep=False)
                    errors.append(str(caught.value))  # noqa: B023

            old = worker_group.worker_pid
            assert old is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.wait_for, "worker_ready")
                for name in "abc":
                    nursery.start_soon(compute, name)
                await trio.testing.wait_all_tasks_blocked()
                os.kill(old, fatal)
            assert len(errors) == 3 and all(words in error for error in errors)
            assert worker_group.worker_pid != old and not os.path.exists(f"/proc/{old}")
            assert is_idle(worker_group)
            async with worker_group.slot() as slot:
                with pytest.raises(StageRefused, match="import them first"):
                    await worker_group.forward(MicroBatch("d", 1, 0), slot, 2, 8)
                assert (await worker_group.import_weights(epoch=0)).epoch == 0
                slot.hidden(2, 8).fill_(0.5)
                slot.targets(2, 8).fill_(1)
                await worker_group.forward(MicroBatch("d", 1, 0), slot, 2, 8)


async def test_a_worker_that_cannot_restart_ends_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline cannot tell a live peer without a worker from one that works."""
    monkeypatch.setattr(StageWorkerGroup, "starts_max", 3)

    def fails(*arguments: object) -> None:
        raise WorkerError("the device is gone")

    in_vain: list[Event] = []
    last_words = pytest.RaisesGroup(pytest.RaisesExc(WorkerError, match="the device is gone.*join again"))
    with last_words:
        async with open_worker(tmp_path, 1) as (worker_group, log):
            monkeypatch.setattr("peer.worker.process.WorkerProcess.start", fails)
            assert worker_group.worker_pid is not None
            os.kill(worker_group.worker_pid, signal.SIGKILL)
            with trio.fail_after(300), log.subscribed(in_vain.append):
                await trio.sleep_forever()
    assert [event.name for event in in_vain].count("worker_failed") == 3


async def test_an_unusable_configuration_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tie_embeddings"):
        async with open_worker(tmp_path, 0, model=msgspec.structs.replace(MODEL, tie_embeddings=True)):
            pass
