"""Groups of two confined ranks against one worker: what they make, ranks that die or hang, and a state that changes
layouts."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from peer.catalogue.machine import MicroBatchHalved
from peer.footprint.layout import Layout
from peer.footprint.step_size import StepSize
from peer.ipc.inner_options import InnerRunOptions
from peer.model.layout import init_flat
from peer.worker.client import InnerResult, WorkerGroup
from tests.peer.support.worker_harness import HOUR_S, MODEL, Log, freeze, hit, open_test_worker_group, state_file
from tests.support.forking.forked import forked_workers

pytestmark = pytest.mark.process
PAIRED = replace(MODEL, kv_heads=2)  # a head for each rank
Made = tuple[InnerResult, list[torch.Tensor], list[float]]


async def train(group: WorkerGroup, strike: Callable[[], Awaitable[None]]) -> Made:
    """Return what a group makes of runs from the outer weights, from the local ones, of a gradient, and after a
    `strike`."""
    numel, products = group.layout.numel, list[torch.Tensor]()
    init_flat(PAIRED, seed=0, out=group.outer)
    losses = [await group.evaluate(2)]
    result = await group.inner_steps([(0, 10), (500, 522)], 0, HOUR_S)
    products.append(group.delta.clone())
    losses.append(await group.evaluate(2))  # of the outer weights, while the local ones wait
    torn = ((5, numel // 3), (numel // 2, numel))
    mixed = InnerRunOptions(begin="local", mix=torn, alpha=0.5, capture=torn)
    await group.inner_steps([(40, 58)], 8, HOUR_S, options=mixed)  # with two rows in the last step
    products.append(group.delta[: sum(stop - start for start, stop in torn)].clone())
    await group.inner_steps([(60, 70)], 12, HOUR_S, options=InnerRunOptions(product="gradient"))
    products.append(group.delta.clone())
    await strike()
    await group.inner_steps([(100, 140)], 20, HOUR_S)
    products.append(group.delta.clone())
    return result, products, losses


async def test_two_ranks_make_what_one_does(tmp_path: Path, text: Path) -> None:
    """A rank that is lost costs its group a restart: the run is repeated with the state before it."""
    states: list[bytes] = []

    async def run(layout: Layout, strike: Callable[[WorkerGroup, Log], Awaitable[None]]) -> Made:
        folder = tmp_path / str(layout)
        folder.mkdir()
        changes = {"model": PAIRED, "ranks": layout, "step_size": StepSize(1), "silence_s": 6.0}
        with ExitStack() as forking:
            if layout.replicate == 1:  # what FSDP imports, forks import themselves, confined
                forking.enter_context(forked_workers())
            async with open_test_worker_group(folder, text, **changes) as (group, log):

                async def struck() -> None:
                    forking.enter_context(forked_workers())  # those that replace these
                    await strike(group, log)

                return await train(group, struck)

    async def keep(group: WorkerGroup, log: Log) -> None:
        states.append(state_file(group).read_bytes())

    async def kill(group: WorkerGroup, log: Log) -> None:
        assert "SIGKILL" in await hit(group, log, lambda pid: os.kill(pid, signal.SIGKILL), rank=1)

    async def freeze_and_resume(group: WorkerGroup, log: Log) -> None:
        """With the state of one device, and the micro-batches that the group had come to."""
        state_file(group).write_bytes(states[0])
        smaller = StepSize(1, "full")
        log.emit(MicroBatchHalved(sequences=smaller.sequences, recompute=smaller.recompute))
        assert "silent for 6 s" in await hit(group, log, freeze, rank=1)
        await group.evaluate(1)
        assert group.loaded is not None and group.loaded.step_size == smaller

    result, products, losses = await run(Layout(), keep)
    for layout, strike in ((Layout(replicate=2), kill), (Layout(shard=2), freeze_and_resume)):
        mine, made, told = await run(layout, strike)
        assert (mine.steps, mine.sequences, mine.tokens) == (result.steps, result.sequences, result.tokens)
        assert math.isclose(mine.loss, result.loss, rel_tol=1e-5)
        assert told == pytest.approx(losses, rel=1e-5)
        for one, several in zip(products, made, strict=True):
            assert (several - one).norm() <= 1e-5 * one.norm(), layout
