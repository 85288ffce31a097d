"""The parent's side of compute: starts the worker, gives it commands, and replaces it when it dies.

The worker is a child process with a control socket and shared memory. Weights and pseudo-gradients lie in buffers that
the network process owns, so they outlive any worker. A worker that crashes, hangs or is killed costs the command that
was running (WorkerError) and nothing else: another one is started at once, and the next command waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from peer.errors import WorkerError
from peer.ipc import messages as control
from peer.ipc.inner_orders import InnerRunOptions
from peer.ipc.messages import InnerResult
from peer.model.layout import FlatLayout
from peer.worker.supervisor import Pending, Supervisor, WorkerBuffers, WorkerConfig

__all__ = ["InnerResult", "InnerRunOptions", "WorkerConfig", "WorkerGroup", "open_worker_group"]


class WorkerGroup:
    """Commands to the worker; from `open_worker_group`. One command runs at a time, in the order of the calls.

    `outer` and `delta` are flat fp32 vectors in the canonical order of `layout`. The caller writes `outer` (never
    while a command runs that reads it) and reads `delta` after `inner_steps`. `inner_state` holds the inner optimizer's
    state as of the last `inner_steps` (uint8, `peer.compute.inner_optimizer.state_bytes`); a worker that is started
    anew takes it up.
    """

    def __init__(self, config: WorkerConfig, buffers: WorkerBuffers) -> None:
        self.config = config
        self.layout = FlatLayout.of(config.model)
        self.outer = buffers.outer.tensor
        self.delta = buffers.delta.tensor
        self.inner_state = buffers.inner_state.tensor
        self._ids = itertools.count()
        self._pending: dict[int, Pending] = {}  # in the order of the calls
        self._supervisor = Supervisor(config, buffers, self._pending)
        self._sending = trio.Lock()
        self._stop_wanted = trio.Event()

    @property
    def loaded(self) -> control.ModelLoaded | None:
        """What the worker said of itself when it had loaded."""
        return self._supervisor.loaded

    @property
    def worker_pid(self) -> int | None:
        """The live worker's process id; None while one is being started."""
        return None if self._supervisor.child is None else self._supervisor.child.pid

    async def inner_steps(
        self,
        ranges: list[tuple[int, int]],
        first_step: int,
        deadline_s: float,
        steps: int | None = None,
        *,
        orders: InnerRunOptions = InnerRunOptions(),  # noqa: B008  frozen
    ) -> InnerResult:
        """Train on the samples of the half-open ranges, in order: as a rule from `outer` on, leaving outer - local in
        `delta`; `orders` say otherwise.

        Ends at the step boundary after `deadline_s` seconds, `steps` steps, the last sample or `stop_inner`, whichever
        is first. `first_step` is the run's inner step, which sets the learning rate. `sequences` of the result counts
        the samples consumed. Cancelled, it has the worker stop at its next step. Raises WorkerError, and ValueError
        for orders that do not fit the model.

        A run with begin="local" and capture=() is a tail: training that goes on while an exchange is in flight. While
        it runs, `delta` and `outer` may be read, and `outer` written: it touches neither, save for `mix` before its
        first step, and for a worker that was just started anew, which begins from `outer` as it finds it.
        """
        orders.check(self.layout.numel)
        reply = await self._ask(lambda id: control.RunInner(id, ranges, first_step, deadline_s, steps, orders), True)
        assert isinstance(reply, control.InnerDone)
        return reply.result

    def stop_inner(self, after_steps: int = 0) -> None:
        """Have the running `inner_steps` (of several, the one called first) return after its current step, but not
        before it has made `after_steps` steps; of several stops the earliest holds. Without one, do nothing."""
        for id, pending in self._pending.items():
            if pending.inner:
                if pending.stop is None or after_steps < pending.stop.after_steps:
                    pending.stop = control.Stop(id, after_steps)
                    self._stop_wanted.set()
                return

    async def evaluate(self, max_batches: int = 8) -> float:
        """Loss of `outer` on the held-out text in nats a byte, over at most `max_batches` batches. The worker's local
        weights stay as they are. WorkerError."""
        reply = await self._ask(lambda id: control.RunEvaluate(id, max_batches))
        assert isinstance(reply, control.Evaluated)
        return reply.nats_per_byte

    async def sample(self, prompt: str, max_new_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
        """What the weights in `outer` continue the prompt with. The worker's local weights stay as they are.
        WorkerError."""
        reply = await self._ask(lambda id: control.RunSample(id, prompt, max_new_tokens, temperature, seed))
        assert isinstance(reply, control.Sampled)
        return reply.text

    async def _ask(self, build: Callable[[int], control.Command], inner: bool = False) -> control.Reply:
        id = next(self._ids)
        pending = self._pending[id] = Pending(inner)
        try:
            async with self._sending:  # first come, first served, also by a worker that was awaited
                child = await self._supervisor.ready()
                pending.sent = True
                if pending.stop is not None:  # asked for already: behind the command it could come too late
                    await child.send(pending.stop)
                await child.send(build(id))
            await pending.done.wait()
        finally:
            del self._pending[id]
            if pending.sent and not pending.done.is_set():  # cancelled: free the worker for the next command
                with trio.CancelScope(shield=True):  # no deadline: untold, the worker would train on
                    await child.send(control.Stop(id))
        if isinstance(pending.result, WorkerError):
            raise pending.result
        assert pending.result is not None
        return pending.result

    async def _forward_stops(self) -> None:
        while True:
            await self._stop_wanted.wait()
            self._stop_wanted = trio.Event()
            for pending in tuple(self._pending.values()):
                if pending.sent and pending.stop is not None and self._supervisor.child is not None:
                    await self._supervisor.child.send(pending.stop)


@asynccontextmanager
async def open_worker_group(config: WorkerConfig) -> AsyncIterator[WorkerGroup]:
    """Start the worker and keep one running for as long as the block lasts.

    Raises ConfigError where the configuration cannot work on this machine, WorkerError where the worker dies while it
    loads, ResourceError where there is no memory for the buffers.
    """
    config.directory.mkdir(parents=True, exist_ok=True)
    with WorkerBuffers.open(config) as buffers:
        worker_group = WorkerGroup(config, buffers)
        try:
            await worker_group._supervisor.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker_group._supervisor.run)
                nursery.start_soon(worker_group._forward_stops)
                try:
                    yield worker_group
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            await worker_group._supervisor.close()
