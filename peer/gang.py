"""The parent's side of compute: starts the worker, gives it commands, and replaces it when it dies.

The worker is a child process with a control socket and shared memory. Weights and pseudo-gradients lie in buffers that
the network process owns, so they outlive any worker. A worker that crashes, hangs or is killed costs the command that
was running (WorkerError) and nothing else: another one is started at once, and the next command waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from peer import control
from peer.buffers import SharedBuffer
from peer.child import Child, handshake
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.control import InnerResult
from peer.device import usable_cores
from peer.errors import ConfigError, WorkerError
from peer.events import EventLog
from peer.layout import FlatLayout
from peer.tokenizer import BYTES

__all__ = ["Gang", "GangConfig", "InnerResult", "open_gang"]

_BACKOFF_MAX_S = 30.0
_LISTEN_S = 1.0
_STOP_SEND_S = 1.0


@dataclass(frozen=True)
class GangConfig:
    """What to compute and on what. `directory` takes worker.log and cached token ids.

    `threads` is per worker (None: every core this process may use), `micro_batch_size` the sequences that fit on the
    device at once (None: the whole batch). A worker silent for `silence_s` is hung (stopped, or swapped to death), and
    so is one that makes no step for `stall_s` while it has a command.
    """

    model: ModelConfig
    data: DataConfig
    inner: InnerConfig
    directory: Path
    events: EventLog
    tokenizer: str = BYTES
    device: str = "auto"
    seed: int = 0
    threads: int | None = None
    micro_batch_size: int | None = None
    silence_s: float = 15.0
    stall_s: float = 300.0
    load_timeout_s: float = 600.0


@dataclass(frozen=True)
class GangBuffers:
    """The memory that the network process and its worker share."""

    outer: SharedBuffer
    delta: SharedBuffer
    moments: SharedBuffer

    @classmethod
    @contextmanager
    def open(cls, directory: Path, numel: int) -> Iterator[GangBuffers]:
        """For a model of `numel` parameters. The memory lives on while anybody holds one of the tensors."""
        with ExitStack() as stack:
            sizes = (numel, numel, 2 * numel + 1)
            yield cls(*(stack.enter_context(closing(SharedBuffer.create(directory, size))) for size in sizes))


@dataclass
class _Pending:
    """A command without a reply; `result` is the reply, or the error that stands for it."""

    done: trio.Event = field(default_factory=trio.Event)
    result: control.Reply | WorkerError | None = None

    def settle(self, result: control.Reply | WorkerError) -> None:
        self.result = result
        self.done.set()


class Gang:
    """Commands to the worker; from `open_gang`. One command runs at a time, in the order of the calls.

    `outer` and `delta` are flat fp32 vectors in the canonical order of `layout`. The caller writes `outer` (never
    while a command runs) and reads `delta` after `inner_steps`. `moments` holds AdamW's state as of the last
    `inner_steps` (2P + 1 values); write it before the first command to train on warm after a restart.
    """

    def __init__(self, config: GangConfig, buffers: GangBuffers) -> None:
        self.config = config
        self.layout = FlatLayout.of(config.model)
        self.outer = buffers.outer.tensor
        self.delta = buffers.delta.tensor
        self.moments = buffers.moments.tensor
        self._buffers = buffers
        self.loaded: control.Loaded | None = None
        self._ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._inner_id: int | None = None
        self._child: Child | None = None
        self._spawned = trio.Event()  # set and replaced after each attempt to start a worker
        self._spawn_error: WorkerError | None = None
        self._stops, self._stop_requests = trio.open_memory_channel[int](1)

    @property
    def worker_pid(self) -> int | None:
        """The live worker's process id; None while one is being started."""
        return None if self._child is None else self._child.pid

    async def inner_steps(
        self, ranges: list[tuple[int, int]], first_step: int, deadline_s: float, steps: int | None = None
    ) -> InnerResult:
        """Train from `outer` on the samples of the half-open ranges, in order, and leave outer - local in `delta`.

        Ends at the step boundary after `deadline_s` seconds, `steps` steps, the last sample or `stop_inner`, whichever
        is first. `first_step` is the run's inner step, which sets the learning rate. Raises WorkerError.
        """
        reply = await self._ask(lambda id: control.RunInner(id, ranges, first_step, deadline_s, steps), inner=True)
        assert isinstance(reply, control.InnerDone)
        return reply.result

    def stop_inner(self) -> None:
        """Have the running `inner_steps` return after its current step; without one, do nothing."""
        if self._inner_id is not None:
            with suppress(trio.WouldBlock):  # a stop for it is already on its way
                self._stops.send_nowait(self._inner_id)

    async def evaluate(self, max_batches: int = 8) -> float:
        """Loss of `outer` on the held-out text in nats a byte, over at most `max_batches` batches. WorkerError."""
        reply = await self._ask(lambda id: control.RunEvaluate(id, max_batches))
        assert isinstance(reply, control.Evaluated)
        return reply.nats_per_byte

    async def sample(self, prompt: str, max_new_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
        """What the weights in `outer` continue the prompt with. WorkerError."""
        reply = await self._ask(lambda id: control.RunSample(id, prompt, max_new_tokens, temperature, seed))
        assert isinstance(reply, control.Sampled)
        return reply.text

    async def _ask(self, build: Callable[[int], control.Command], inner: bool = False) -> control.Reply:
        child = await self._ready()
        id = next(self._ids)
        pending = self._pending[id] = _Pending()
        if inner:
            self._inner_id = id
        try:
            await child.send(build(id))
            await pending.done.wait()
        finally:
            del self._pending[id]
            if self._inner_id == id:
                self._inner_id = None
            if not pending.done.is_set():  # cancelled: free the worker for the next command
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _STOP_SEND_S):
                    await child.send(control.Stop(id))
        if isinstance(pending.result, WorkerError):
            raise pending.result
        assert pending.result is not None
        return pending.result

    async def _ready(self) -> Child:
        while self._child is None:
            await self._spawned.wait()
            if self._spawn_error is not None:
                raise self._spawn_error
        return self._child

    async def _spawn(self) -> Child:
        """Start a worker and wait until it has loaded. Raises WorkerError or ConfigError."""
        config = self.config
        started = trio.current_time()
        outer_fd, delta_fd, moments_fd = self._buffers.outer.fd, self._buffers.delta.fd, self._buffers.moments.fd
        child = Child.start(
            config.directory / "worker.log",
            config.threads or usable_cores(),
            (outer_fd, delta_fd, moments_fd),
        )
        load = control.Load(
            model=config.model,
            data=config.data,
            inner=config.inner,
            tokenizer=config.tokenizer,
            directory=str(config.directory),
            device=config.device,
            seed=config.seed,
            micro_batch_size=config.micro_batch_size,
            outer_fd=outer_fd,
            delta_fd=delta_fd,
            moments_fd=moments_fd,
        )
        try:
            answer = await handshake(child, load, config.load_timeout_s)
        except BaseException:
            await child.destroy()
            raise
        if isinstance(answer, control.Rejected):
            await child.destroy()
            raise ConfigError(answer.message)
        self.loaded = answer
        config.events.emit(
            "worker_ready",
            pid=child.pid,
            device=answer.device,
            bf16=answer.bf16,
            compiled=answer.compiled,
            corpus_truncated=answer.corpus_truncated,
            seconds=round(trio.current_time() - started, 3),
        )
        return child

    async def _supervise(self) -> None:
        """Serve the worker until it dies, bury it, start the next; for ever."""
        while True:
            assert self._child is not None
            child, cause = self._child, await self._serve(self._child)
            self._child, self._spawned = None, trio.Event()
            self.config.events.emit("worker_died", pid=child.pid, cause=cause)
            error = WorkerError(f"the compute worker was lost: {cause}; a new one is starting")
            for pending in tuple(self._pending.values()):
                pending.settle(error)
            await self._respawn()

    async def _respawn(self) -> None:
        backoff_s = 0.5
        while self._child is None:
            try:
                self._child, self._spawn_error = await self._spawn(), None
            except (WorkerError, ConfigError) as error:
                self._spawn_error = WorkerError(str(error))
                self.config.events.emit("worker_failed", cause=str(error), retry_s=backoff_s)
            self._spawned.set()
            if self._child is None:
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                self._spawned = trio.Event()

    async def _serve(self, child: Child) -> str:
        """Dispatch what the worker says until it dies or hangs; returns the cause as a sentence without subject."""
        ticks, moved_at = -1, trio.current_time()
        while True:
            quiet_s = 0.0  # counted in short waits: time in which we were frozen ourselves is not its silence
            while quiet_s < self.config.silence_s:
                with trio.move_on_after(_LISTEN_S) as patience:
                    message = await child.receive()
                if not patience.cancelled_caught:
                    break
                quiet_s += _LISTEN_S
            else:
                await child.destroy()
                return f"it was silent for {self.config.silence_s:g} s and was killed"
            if message is None:
                return await child.post_mortem()
            if isinstance(message, control.Progress):
                self.config.events.emit(
                    "inner_step",
                    step=message.step,
                    loss=round(message.loss, 4),
                    lr=message.lr,
                    tokens_per_s=round(message.tokens_per_s, 1),
                    skipped=message.skipped,
                )
            elif isinstance(message, control.Beat):
                if message.ticks != ticks or not self._pending:
                    ticks, moved_at = message.ticks, trio.current_time()
                elif trio.current_time() - moved_at > self.config.stall_s:
                    await child.destroy()
                    return f"it made no step for {self.config.stall_s:g} s and was killed (raise stall_s?)"
            elif isinstance(message, control.Reply) and message.id in self._pending:
                self._pending[message.id].settle(message)

    async def _forward_stops(self) -> None:
        async for id in self._stop_requests:
            if self._child is not None:
                await self._child.send(control.Stop(id))

    async def _close(self) -> None:
        if self._child is not None:
            await self._child.destroy()


@asynccontextmanager
async def open_gang(config: GangConfig) -> AsyncIterator[Gang]:
    """Start the worker and keep one running for as long as the block lasts.

    Raises ConfigError where the configuration cannot work on this machine, WorkerError where the worker dies while it
    loads, ResourceError where there is no memory for the buffers.
    """
    config.directory.mkdir(parents=True, exist_ok=True)
    with GangBuffers.open(config.directory, FlatLayout.of(config.model).numel) as buffers:
        gang = Gang(config, buffers)
        try:
            gang._child = await gang._spawn()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(gang._supervise)
                nursery.start_soon(gang._forward_stops)
                try:
                    yield gang
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            await gang._close()
