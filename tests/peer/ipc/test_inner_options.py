"""Inner runs with options in a real worker, compared with the same computed in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch
import trio
import trio.testing

from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import InnerConfig, MasterType
from peer.data.text_corpus import TextCorpus, load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.events import EventLog
from peer.footprint.layout import Compute
from peer.ipc.first_message import FirstMessage
from peer.ipc.messages import ModelLoaded, Rejected, Stop
from peer.ipc.train_messages import RunInner
from peer.model.decoder import Decoder
from peer.model.layout import init_flat
from peer.worker.client import InnerRunOptions, WorkerGroup
from peer.worker.config import WorkerBuffers
from peer.worker.process import WorkerProcess, handshake
from tests.peer.model.reference_loss import next_token_loss
from tests.peer.support.worker_harness import (
    ENDLESS,
    HOUR_S,
    INNER,
    MODEL,
    Log,
    freeze,
    open_test_worker_group,
    saved_state,
    worker_config,
)

LOCAL = InnerRunOptions(begin="local")
TAIL = InnerRunOptions(begin="local", capture=())


@dataclass
class Twins:
    """A worker, and a trainer of this process that does the same."""

    worker_group: WorkerGroup
    log: Log
    corpus: TextCorpus
    mine: InnerTrainer

    def steps(self, numbers: range, first_step: int) -> None:
        """Here alone."""
        for k, at in enumerate(range(numbers.start, numbers.stop, 4)):
            self.mine.step(self.corpus.batch(list(range(at, at + 4)), 0), first_step + k)

    def new_outer(self, seed: int) -> None:
        init_flat(MODEL, seed=seed, out=self.worker_group.outer)

    async def kill(self) -> None:
        """Kill the idle worker; returns once there is a new one."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.log.wait_for, "worker_ready")
            await trio.testing.wait_all_tasks_blocked()
            assert self.worker_group.worker_pid is not None
            os.kill(self.worker_group.worker_pid, signal.SIGKILL)


@asynccontextmanager
async def _twins(
    directory: Path, text: Path, inner: InnerConfig = INNER, weights: MasterType = "fp32"
) -> AsyncIterator[Twins]:
    torch.set_num_threads(1)  # like the worker: more would add up in another order
    compute = Compute("cpu", threads=1, weights=weights)
    async with open_test_worker_group(directory, text, inner=inner, compute=compute) as (worker_group, log):
        mine = InnerTrainer(MODEL, inner, resolve_device("cpu"), weights=weights)
        yield Twins(worker_group, log, load_corpus(worker_group.config.data, ByteTokenizer(), str(text)), mine)


@pytest.mark.process
@pytest.mark.usefixtures("forked")
async def test_a_worker_equals_this_process(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _twins(tmp_path, text) as twins:
        await _local_stream(twins)
        await _tail(twins)
        await _gradients(twins)
        await _stops(twins.worker_group)
        await _new_worker(twins, monkeypatch)


@pytest.mark.process
@pytest.mark.usefixtures("forked")
async def test_a_worker_with_split_weights_equals_this_process(tmp_path: Path, text: Path) -> None:
    """Also one that takes another's place. No step leaves a delta of zero."""
    async with _twins(tmp_path, text, weights="split") as twins:
        worker_group, mine, wanted = twins.worker_group, twins.mine, torch.empty_like(twins.worker_group.delta)
        for numbers, first_step in ((range(0), 0), (range(16), 0), (range(16, 24), 4)):
            await worker_group.inner_steps([(numbers.start, numbers.stop)], first_step, HOUR_S)
            mine.import_from(worker_group.outer)
            twins.steps(numbers, first_step)
            mine.write_delta(worker_group.outer, slice(None), wanted)
            assert torch.equal(worker_group.delta, wanted) and bool(wanted.any()) == bool(numbers)
            if first_step == 0 and numbers:
                await twins.kill()
        loss = await worker_group.evaluate(2)
        with mine.holding(worker_group.outer):
            assert loss == pytest.approx(mine.evaluate(twins.corpus.held_out_batches(4, 2), lambda: None))


async def _local_stream(twins: Twins) -> None:
    worker_group, mine = twins.worker_group, twins.mine
    # a worker without local weights begins from outer, and has nothing to mix
    await worker_group.inner_steps(
        [(0, 8)], 0, HOUR_S, options=InnerRunOptions(begin="local", mix=((0, 100),), alpha=0.5)
    )
    mine.local.copy_(worker_group.outer)
    twins.steps(range(8), 0)
    assert torch.equal(worker_group.delta, worker_group.outer - mine.local)

    # spans mixed before, others captured after; what lies behind them in delta stays
    twins.new_outer(1)
    worker_group.delta.fill_(7.0)
    options = InnerRunOptions(begin="local", mix=((10, 500), (900, 1000)), alpha=0.25, capture=((5, 20), (950, 2000)))
    await worker_group.inner_steps([(8, 16)], 2, HOUR_S, options=options)
    for span in (slice(10, 500), slice(900, 1000)):
        mine.local[span] = 0.25 * mine.local[span] + 0.75 * worker_group.outer[span]
    twins.steps(range(8, 16), 2)
    gap = worker_group.outer - mine.local
    assert torch.equal(worker_group.delta[:1065], torch.cat([gap[5:20], gap[950:2000]]))
    assert bool((worker_group.delta[1065:] == 7.0).all())

    # alpha 0 copies; no step, so the copy is what is captured
    await worker_group.inner_steps(
        [(16, 20)], 4, HOUR_S, steps=0, options=InnerRunOptions(begin="local", mix=((0, 40),))
    )
    mine.local[:40] = worker_group.outer[:40]
    assert not worker_group.delta[:40].any() and torch.equal(worker_group.delta[40:], gap[40:])


async def _tail(twins: Twins) -> None:
    """A tail reads and writes no shared memory, and an evaluation does not disturb the local weights."""
    worker_group, mine = twins.worker_group, twins.mine
    delta = worker_group.delta.clone()
    worker_group.outer.fill_(torch.nan)
    result = await worker_group.inner_steps([(20, 36)], 4, HOUR_S, options=TAIL)
    assert (result.steps, result.skipped) == (4, 0) and torch.equal(worker_group.delta, delta)
    twins.steps(range(20, 36), 4)

    twins.new_outer(2)
    loss = await worker_group.evaluate(2)
    await worker_group.inner_steps([(36, 40)], 8, HOUR_S, options=LOCAL)
    twins.steps(range(36, 40), 8)
    assert torch.equal(worker_group.delta, worker_group.outer - mine.local)
    with mine.holding(worker_group.outer):
        assert loss == pytest.approx(mine.evaluate(twins.corpus.held_out_batches(4, 2), lambda: None))


async def _gradients(twins: Twins) -> None:
    """The mean over sequences at the outer weights; the inner optimizer stays."""
    worker_group, mine = twins.worker_group, twins.mine
    kept = saved_state(worker_group)
    twins.new_outer(1)
    result = await worker_group.inner_steps([(40, 50)], 3, HOUR_S, options=InnerRunOptions(product="gradient"))
    assert (result.steps, result.sequences, result.tokens, result.skipped) == (3, 10, 320, 0)

    model = Decoder(MODEL, init_flat(MODEL, seed=1).double())
    model.cos, model.sin = model.cos.double(), model.sin.double()
    tokens = twins.corpus.batch(list(range(40, 50)), 0)
    loss = next_token_loss(model(tokens[:, :-1]), tokens)  # all ten at once: batches of 4, 4 and 2 must weigh so
    grads = torch.autograd.grad(loss, [parameter for _, parameter in model.canonical_parameters()])
    exact = torch.cat([grad.reshape(-1) for grad in grads])
    assert float((worker_group.delta - exact).norm() / exact.norm()) < 1e-5
    assert float(exact.norm()) > INNER.clip_norm  # nothing was clipped
    whole = worker_group.delta.clone()
    spans = InnerRunOptions(product="gradient", capture=((3, 9), (100, 200)))
    await worker_group.inner_steps([(40, 50)], 3, HOUR_S, options=spans)
    assert torch.equal(worker_group.delta[:106], torch.cat([whole[3:9], whole[100:200]]))

    assert torch.equal(saved_state(worker_group), kept)
    await worker_group.inner_steps([(50, 54)], 3, HOUR_S, options=LOCAL)  # the weights had stayed at outer
    mine.local.copy_(worker_group.outer)
    twins.steps(range(50, 54), 3)
    assert torch.equal(worker_group.delta, worker_group.outer - mine.local)

    worker_group.outer[0] = torch.nan
    result = await worker_group.inner_steps([(0, 8)], 0, HOUR_S, options=InnerRunOptions(product="gradient"))
    assert (result.steps, result.sequences, result.skipped) == (2, 8, 2) and not worker_group.delta.any()
    twins.new_outer(1)


async def _stops(worker_group: WorkerGroup) -> None:
    """A stop waits for its steps; of several the earliest holds."""
    endless = ENDLESS[0][1]
    pid = worker_group.worker_pid
    assert pid is not None
    made: dict[int, int] = {}  # by samples: replies that were read at once wake their callers in any order

    async def run(samples: int) -> None:
        made[samples] = (await worker_group.inner_steps([(0, samples)], 0, HOUR_S, options=TAIL)).steps

    for stops, steps in (([30], 30), ([40, 20, 60], 20), ([10**6, 0], 0)):
        async with trio.open_nursery() as nursery:
            freeze(pid)  # so that it makes no steps past a stop that is yet to come
            nursery.start_soon(run, endless)
            await trio.testing.wait_all_tasks_blocked()
            for after_steps in stops:
                worker_group.stop_inner(after_steps)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(pid, signal.SIGCONT)
        assert made == {endless: steps}

    async with trio.open_nursery() as nursery:  # of two runs the first is stopped; the second ends by its samples
        freeze(pid)
        for samples in (endless, 40):
            nursery.start_soon(run, samples)
            await trio.testing.wait_all_tasks_blocked()
        worker_group.stop_inner(15)
        await trio.testing.wait_all_tasks_blocked()
        os.kill(pid, signal.SIGCONT)
    assert made == {endless: 15, 40: 10}

    made.clear()
    with trio.move_on_after(0):  # given up before it began: the worker is free at once
        await run(endless)
    await run(40)
    assert made == {40: 10}


async def _new_worker(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker begins at the outer weights. A stop from before its start holds."""
    worker_group, mine = twins.worker_group, twins.mine
    before = saved_state(worker_group)
    stop_asked = trio.Event()

    async def late(
        worker: WorkerProcess, load: FirstMessage, timeout_s: float, events: EventLog
    ) -> ModelLoaded | Rejected:
        await stop_asked.wait()  # else the worker might be ready before the stop
        return await handshake(worker, load, timeout_s, events)

    monkeypatch.setattr("peer.worker.supervisor.handshake", late)
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            assert (await worker_group.inner_steps([(0, 10**9)], 2, HOUR_S, options=LOCAL)).steps == 2

        async def run_without_worker() -> None:
            await twins.log.wait_for("worker_died")
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            worker_group.stop_inner(2)
            stop_asked.set()

        nursery.start_soon(run_without_worker)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(twins.kill)
    mine.optimizer.load(before)
    mine.local.copy_(worker_group.outer)
    twins.steps(range(8), 2)
    assert torch.equal(worker_group.delta, worker_group.outer - mine.local)


class SlowWorker:
    """Stands in for a worker process: notes the messages sent to it, once it `reads`."""

    def __init__(self) -> None:
        self.reads = trio.Event()
        self.got: list[object] = []

    async def send(self, *messages: object) -> None:
        await self.reads.wait()
        self.got += messages


@contextmanager
def _slow_worker(directory: Path, text: Path) -> Iterator[tuple[WorkerGroup, SlowWorker]]:
    """A group without a worker, and a worker to give it."""
    config = worker_config(directory, text)
    with WorkerBuffers.open(config) as buffers:
        yield WorkerGroup(config, buffers), SlowWorker()


async def test_an_early_stop_is_sent_before_the_command(tmp_path: Path, text: Path) -> None:
    """After it, the worker could have made more steps by then."""
    with _slow_worker(tmp_path, text) as (worker_group, worker):
        worker.reads.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker_group.inner_steps, ENDLESS, 0, HOUR_S)
            await trio.testing.wait_all_tasks_blocked()
            worker_group.stop_inner(2)
            worker_group._supervisor.workers = (worker,)  # type: ignore[assignment]
            worker_group._supervisor._started.set()
            await trio.testing.wait_all_tasks_blocked()
            stop, command = worker.got
            assert stop == Stop(0, 2) and isinstance(command, RunInner) and command.id == 0
            nursery.cancel_scope.cancel()


async def test_a_cancelled_run_is_always_stopped(
    tmp_path: Path, text: Path, mock_clock: trio.testing.MockClock
) -> None:
    with _slow_worker(tmp_path, text) as (worker_group, worker):
        worker_group._supervisor.workers = (worker,)  # type: ignore[assignment]
        given_up = trio.CancelScope()

        async def run() -> None:
            with given_up:
                await worker_group.inner_steps(ENDLESS, 0, HOUR_S)

        async with trio.open_nursery() as nursery:
            worker.reads.set()
            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            worker.reads = trio.Event()
            given_up.cancel()
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(HOUR_S)
            await trio.testing.wait_all_tasks_blocked()
            worker.reads.set()
        assert worker.got[1:] == [Stop(0)]


@pytest.mark.process
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw8bit",
        "muon",
        *(
            pytest.param(one, marks=pytest.mark.soak) for one in ("adamw", "lion", "lamb")
        ),  # each state: test_train_loop
    ],
)
async def test_a_new_worker_restores_the_optimizer(
    tmp_path: Path, text: Path, optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"]
) -> None:
    """Every bit of the inner optimizer's state outlives the process."""
    inner = msgspec.structs.replace(INNER, optimizer=optimizer, lr=3e-3)
    async with _twins(tmp_path, text, inner) as twins:
        for numbers, first_step in ((range(24), 0), (range(24, 32), 6)):
            await twins.worker_group.inner_steps([(numbers.start, numbers.stop)], first_step, HOUR_S)
            twins.mine.local.copy_(twins.worker_group.outer)
            twins.steps(numbers, first_step)
            assert torch.equal(twins.worker_group.delta, twins.worker_group.outer - twins.mine.local)
            if first_step == 0:
                await twins.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mix": ((0, 5),)}, "nothing to mix"),
        ({"begin": "local", "product": "gradient"}, "taken there"),
        ({"begin": "local", "alpha": 1.5}, "alpha is 1.5"),
        ({"capture": ((5, 9), (8, 12))}, "do not overlap"),
        ({"capture": ((5, 5),)}, "not empty"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InnerRunOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leaves the flat vector of 20"):
        InnerRunOptions(capture=((5, 9), (15, 21))).check(20)
