"""One compute worker kept alive: started, listened to, buried when it dies or hangs, and started again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import trio

from peer.compute.device import usable_cores
from peer.compute.inner_optimizer import InnerSpec, state_bytes
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.data.tokenizer import BYTES
from peer.errors import ConfigError, WorkerError
from peer.events import EventLog
from peer.ipc import messages as control
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.stage_slots import SlotArea
from peer.ipc.stage_spec import StageSpec
from peer.model.layout import FlatLayout
from peer.worker.process import WorkerProcess, handshake

_BACKOFF_MAX_S = 30.0
_LISTEN_S = 1.0
_STARTS_MAX = 5  # that fail in a row, where others wait for a stage's work: some 8 s, and what the starts take


@dataclass(frozen=True)
class WorkerConfig:
    """What to compute and on what. `directory` takes worker.log and cached token ids.

    `threads` is per worker (None: every core this process may use), `micro_batch_size` the sequences that fit on the
    device at once (None: the whole batch). A worker silent for `silence_s` is hung (stopped, or swapped to death), and
    so is one that makes no step for `stall_s` while it has a command. `stage`: of a pipeline, to compute that one.
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
    stage: StageSpec | None = None

    @property
    def layout(self) -> FlatLayout:
        """Of what the worker computes: the whole model, or its stage."""
        return FlatLayout.of(self.model, None if self.stage is None else self.stage.layers)


@dataclass(frozen=True)
class WorkerBuffers:
    """The memory that the network process and its worker share; `slots` only where it computes a stage."""

    outer: SharedBuffer
    delta: SharedBuffer
    inner_state: SharedBuffer
    slots: SharedBuffer | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """What the worker inherits."""
        buffers = (self.outer, self.delta, self.inner_state, self.slots)
        return tuple(buffer.fd for buffer in buffers if buffer is not None)

    @classmethod
    @contextmanager
    def open(cls, config: WorkerConfig) -> Iterator[WorkerBuffers]:
        """Of the sizes `config` needs. The memory lives on while anybody holds one of the tensors."""
        layout = config.layout
        kept = state_bytes(InnerSpec.of(config.inner), layout)
        with ExitStack() as stack:

            def create(numel: int, dtype: torch.dtype) -> SharedBuffer:
                return stack.enter_context(closing(SharedBuffer.create(config.directory, numel, dtype)))

            weights = layout.numel, torch.float32
            slots = None
            if config.stage is not None:
                slots = create(SlotArea.size_bytes(config.stage, config.model.hidden_size), torch.uint8)
            yield cls(create(*weights), create(*weights), create(kept, torch.uint8), slots)


@dataclass
class Pending:
    """A command without a reply; `result` is the reply, or the error that stands for it. `sent`: the worker may have
    it; `stop`: what was asked of an inner run meanwhile."""

    inner: bool
    sent: bool = False
    done: trio.Event = field(default_factory=trio.Event)
    result: control.Reply | WorkerError | None = None
    stop: control.Stop | None = None

    def settle(self, result: control.Reply | WorkerError) -> None:
        self.result = result
        self.done.set()


class Supervisor:
    """Keeps one worker running, and settles the commands in `pending` (by id) with its replies or with its loss."""

    def __init__(self, config: WorkerConfig, buffers: WorkerBuffers, pending: Mapping[int, Pending]) -> None:
        self.loaded: control.ModelLoaded | None = None
        self.child: WorkerProcess | None = None
        self.lost = 0  # workers
        self._config = config
        self._buffers = buffers
        self._pending = pending
        self._spawned = trio.Event()  # set and replaced after each attempt to start a worker
        self._spawn_error: WorkerError | None = None

    async def start(self) -> None:
        """The first worker. Raises WorkerError or ConfigError."""
        self.child = await self._spawn()

    async def ready(self) -> WorkerProcess:
        """The worker, once there is one. Raises WorkerError where the next attempt to start it fails."""
        while self.child is None:
            await self._spawned.wait()
            if self._spawn_error is not None:
                raise self._spawn_error
        return self.child

    async def close(self) -> None:
        if self.child is not None:
            await self.child.destroy()

    async def run(self) -> None:
        """Serve the worker until it dies, bury it, start the next; for ever. Where it computes a stage WorkerError once
        it cannot be started any more: of a peer that lives all others in a pipeline expect its part, and where it has
        gone they do without."""
        while True:
            assert self.child is not None
            child, cause = self.child, await self._serve(self.child)
            self.child, self._spawned = None, trio.Event()
            self.lost += 1
            self._config.events.emit("worker_died", pid=child.pid, cause=cause)
            error = WorkerError(f"the compute worker was lost: {cause}; a new one is starting")
            for pending in tuple(self._pending.values()):  # settling may remove it
                if pending.sent:
                    pending.settle(error)
            await self._respawn()

    async def _spawn(self) -> WorkerProcess:
        """Start a worker and wait until it has loaded. Raises WorkerError or ConfigError."""
        config = self._config
        started = trio.current_time()
        buffers = self._buffers
        child = WorkerProcess.start(
            config.directory / "worker.log",
            config.threads or usable_cores(),
            buffers.fds,
        )
        load = control.LoadModel(
            model=config.model,
            data=config.data,
            inner=config.inner,
            tokenizer=config.tokenizer,
            directory=str(config.directory),
            device=config.device,
            seed=config.seed,
            micro_batch_size=config.micro_batch_size,
            outer_fd=buffers.outer.fd,
            delta_fd=buffers.delta.fd,
            inner_state_fd=buffers.inner_state.fd,
            stage=config.stage,
            slots_fd=-1 if buffers.slots is None else buffers.slots.fd,
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

    async def _respawn(self) -> None:
        backoff_s, failed = 0.5, 0
        while self.child is None:
            try:
                self.child, self._spawn_error = await self._spawn(), None
            except (WorkerError, ConfigError) as error:
                self._spawn_error = WorkerError(str(error))
                self._config.events.emit("worker_failed", cause=str(error), retry_s=backoff_s)
                failed += 1
            self._spawned.set()
            if self._spawn_error is not None and self._config.stage is not None and failed >= _STARTS_MAX:
                raise WorkerError(
                    f"the compute worker could not be started again, {failed} times in a row: {self._spawn_error} "
                    "Mend that and join again with the same --home; others take over meanwhile."
                )
            if self.child is None:
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                self._spawned = trio.Event()

    async def _serve(self, child: WorkerProcess) -> str:
        """Dispatch what the worker says until it dies or hangs; returns the cause as a sentence without subject."""
        ticks, moved_at = -1, trio.current_time()
        while True:
            quiet_s = 0.0  # counted in short waits: time in which we were frozen ourselves is not its silence
            while quiet_s < self._config.silence_s:
                with trio.move_on_after(_LISTEN_S) as timeout:
                    message = await child.receive()
                if not timeout.cancelled_caught:
                    break
                quiet_s += _LISTEN_S
            else:
                await child.destroy()
                return f"it was silent for {self._config.silence_s:g} s and was killed"
            if message is None:
                return await child.exit_diagnosis()
            if isinstance(message, control.InnerProgress):
                self._config.events.emit(
                    "inner_step",
                    step=message.step,
                    loss=round(message.loss, 4),
                    lr=message.lr,
                    tokens_per_s=round(message.tokens_per_s, 1),
                    skipped=message.skipped,
                )
            elif isinstance(message, control.Beat):
                if message.ticks != ticks or not any(pending.sent for pending in self._pending.values()):
                    ticks, moved_at = message.ticks, trio.current_time()
                elif trio.current_time() - moved_at > self._config.stall_s:
                    await child.destroy()
                    return f"it made no step for {self._config.stall_s:g} s and was killed (raise stall_s?)"
            elif isinstance(message, control.Reply) and message.id in self._pending:
                self._pending[message.id].settle(message)
