"""The network process's handle on the "train" program.

Weights and pseudo-gradients lie in buffers that the network process owns, so they outlive the workers. A worker that
crashes, hangs or is killed fails the command in flight with a WorkerError and costs nothing else: the group is replaced
at once, and the next command waits for it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import trio

from peer.catalogue.machine import MicroBatchHalved
from peer.decoding import MALFORMED
from peer.events import Event
from peer.footprint.step_size import StepSize
from peer.ipc.inner_options import InnerRunOptions
from peer.ipc.messages import Command, Stop
from peer.ipc.train_messages import InnerResult, LoadTrain, RunEvaluate, RunEvaluateDelta, RunInner
from peer.worker.commands import WorkerCommands
from peer.worker.config import WorkerBuffers, WorkerConfig

__all__ = ["InnerResult", "InnerRunOptions", "WorkerConfig", "WorkerGroup", "open_worker_group"]

_Body = TypeVar("_Body")


@dataclass
class _Run:
    """An inner run that was called and has not returned."""

    stop: Stop | None = None
    sent: bool = False

    def begin(self) -> Stop | None:
        """Note that the command is being sent; returns the stop to send before it."""
        self.sent = True
        return self.stop


class WorkerGroup(WorkerCommands):
    """Commands to a group that trains a whole model; from `open_worker_group`. One command runs at a time, in the order
    of the calls.

    The caller writes `outer`, never while a command runs that reads it, and reads `delta` after `inner_steps`. A new
    worker begins with the inner optimizer's state after the last `inner_steps`; a large one may be some minutes older.
    """

    def __init__(self, config: WorkerConfig, buffers: WorkerBuffers) -> None:
        super().__init__(config, buffers)
        self._runs: dict[int, _Run] = {}  # by command id, in the order of the calls
        self._sending = trio.Lock()
        self._stop_wanted = trio.Event()
        self._step_size = config.step_size or StepSize(config.inner.batch_size)

    async def inner_steps(
        self,
        ranges: list[tuple[int, int]],
        first_step: int,
        deadline_s: float,
        steps: int | None = None,
        *,
        options: InnerRunOptions = InnerRunOptions(),  # noqa: B008  frozen
    ) -> InnerResult:
        """Train on the samples of the half-open ranges, in order: from `outer`, leaving outer - local in `delta`,
        unless `options` say otherwise.

        The run ends at the first step boundary after `deadline_s` seconds, `steps` steps, the last sample or
        `stop_inner`. `first_step` is the run's inner step, which sets the learning rate. If the call is cancelled, the
        worker stops at its next step. Raises WorkerError, and ValueError for options that do not fit the model.

        A run with begin="local" and capture=() is a tail: training during an exchange. While it runs, `delta` and
        `outer` may be read, and `outer` written. It reads `outer` only for `mix` before its first step, or where a new
        worker begins from it.
        """
        options.check(self.layout.numel)
        command = RunInner(next(self._ids), ranges, first_step, deadline_s, steps, options)
        run = self._runs[command.id] = _Run()
        try:
            return await self._ask_in_order(command, InnerResult, run)
        finally:
            del self._runs[command.id]

    def stop_inner(self, after_steps: int = 0) -> None:
        """Let the running `inner_steps` (of several, the first called) return after its current step, but not before it
        has made `after_steps` steps. Of several stops the earliest holds. Without a run, do nothing."""
        for id, run in self._runs.items():
            if run.stop is None or after_steps < run.stop.after_steps:
                run.stop = Stop(id, after_steps)
                self._stop_wanted.set()
            return

    async def evaluate(self, max_batches: int = 8) -> float:
        """Return the loss of `outer` on the held-out text in nats a byte, over at most `max_batches` batches. The
        worker's local weights stay as they are. Raises WorkerError."""
        return await self._ask_in_order(RunEvaluate(next(self._ids), max_batches), float, _Run())

    async def evaluate_delta(self, max_batches: int) -> list[float]:
        """Return the losses of the weights that the caller has written to `delta`, in nats a token, of at most
        `max_batches` held-out batches. Raises WorkerError."""
        return await self._ask_in_order(RunEvaluateDelta(next(self._ids), max_batches), list[float], _Run())

    async def _ask_in_order(self, command: Command, kind: type[_Body], run: _Run) -> _Body:
        async with self._sending:  # first come, first served, also while a group is being started
            pending = await self._supervisor.send(command, after=run.begin)
        try:
            await pending.done.wait()
        except trio.Cancelled:
            await self.cancel(command.id)  # frees the worker for the next command
            raise
        return pending.results(kind)[0]

    def _first_message(self, rank: int) -> LoadTrain:
        config = self.config
        return LoadTrain(
            rank=rank,
            layout=config.ranks,
            meeting=self._meeting,
            run=config.run,
            model=config.model,
            inner=config.inner,
            corpus=config.load_corpus(config.private_folder),
            compute=config.compute,
            step_size=self._step_size,
            seed=config.seed,
            vectors=self._buffers.vectors,
            base=config.base,
        )

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._forward_stops)
            with self.config.events.subscribed(self._note):
                await super()._run()

    def _note(self, event: Event) -> None:
        """Let the next group begin with the micro-batches that this one has come to: it may have ended for them."""
        if event.name == MicroBatchHalved.event_name():
            with suppress(*MALFORMED):  # a worker said so
                self._step_size = msgspec.convert(event.fields, StepSize)

    async def _forward_stops(self) -> None:
        while True:
            await self._stop_wanted.wait()
            self._stop_wanted = trio.Event()
            for run in tuple(self._runs.values()):
                if run.sent and run.stop is not None:
                    await self._supervisor.tell(run.stop)


def open_worker_group(config: WorkerConfig) -> AbstractAsyncContextManager[WorkerGroup]:
    """Open a group that trains the whole model; see `WorkerCommands.open`."""
    return WorkerGroup.open(config)
