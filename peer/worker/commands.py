"""The base of the handles on a worker group: commands to the workers of one program."""

from __future__ import annotations

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import ClassVar, Self, TypeVar

import trio

from peer.ipc.first_message import FirstMessage
from peer.ipc.messages import MEETING, Command, ModelLoaded, Stop
from peer.worker.config import WorkerBuffers, WorkerConfig
from peer.worker.launch import WorkerLaunch
from peer.worker.process import make_private
from peer.worker.supervisor import Supervisor

_Body = TypeVar("_Body")


class WorkerCommands(ABC):
    """Commands to a supervised group of workers that run one program, a subclass's.

    `outer` and `delta` are flat fp32 vectors in the canonical order of `layout`. The network process owns this memory,
    so it outlives the workers. The inner optimizer's state is theirs (`peer.checkpoint.inner_state`).
    """

    starts_max: ClassVar[int | None] = None
    """The failed starts in a row after which the group gives up; None: never."""

    def __init__(self, config: WorkerConfig, buffers: WorkerBuffers) -> None:
        self.config = config
        self.layout = config.layout
        self.outer = buffers.outer.tensor
        self.delta = buffers.delta.tensor
        self._ids = itertools.count()
        self._buffers = buffers
        self._meeting = ""
        """The name of the file at which the ranks of the present group meet."""
        self._supervisor = Supervisor(
            WorkerLaunch(
                directory=config.directory,
                private_folder=config.private_folder,
                events=config.events,
                open_descriptors=self._descriptors,
                first_message=self._first_message,
                world_size=config.world_size,
                threads=config.compute.threads_each,
                nice=config.nice,
                silence_s=config.silence_s,
                stall_s=config.stall_s,
                load_timeout_s=config.load_timeout_s,
                starts_max=self.starts_max,
            )
        )
        if config.suspended:
            self._supervisor.suspend_soon()

    @classmethod
    def open_buffers(cls, config: WorkerConfig) -> AbstractContextManager[WorkerBuffers]:
        """Open the memory that the program shares with this process."""
        return WorkerBuffers.open(config)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: WorkerConfig) -> AsyncIterator[Self]:
        """Start the workers and keep a group running for as long as the block lasts.

        Raises ConfigError if the configuration does not work on this machine, WorkerError if a worker dies while it
        loads, ResourceError if there is no memory for the buffers.
        """
        make_private(config.private_folder)
        with cls.open_buffers(config) as buffers:
            group = cls(config, buffers)
            try:
                await group._supervisor.start()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(group._run)
                    try:
                        yield group
                    finally:
                        nursery.cancel_scope.cancel()
            finally:
                await group._supervisor.close()

    @property
    def loaded(self) -> ModelLoaded | None:
        """Rank 0's report after loading."""
        return self._supervisor.loaded

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the live workers by rank; empty while a group is being started."""
        return tuple(worker.pid for worker in self._supervisor.workers)

    @property
    def worker_pid(self) -> int | None:
        """The process id of rank 0; None while a group is being started."""
        return next(iter(self.worker_pids), None)

    @property
    def generation(self) -> int:
        """The number of groups lost. It grows before a call that was lost raises WorkerError."""
        return self._supervisor.generation

    async def suspend(self) -> None:
        """End the workers, which frees their devices, and start no others before `resume`. The vectors keep their
        values. Until then every command fails with WorkerError."""
        await self._supervisor.suspend()

    async def resume(self) -> None:
        """Start the workers again, and wait for them. Raises WorkerError if the first start fails; others follow."""
        self._supervisor.resume()
        await self._supervisor.ready()

    async def ask(self, command: Command, kind: type[_Body], rank: int | None = None) -> _Body:
        """Send the command to one rank, or to all (None); return the result of the lowest rank asked. Raises
        StageRefused if a rank refuses, WorkerError if the group is lost."""
        return (await self.ask_each(command, kind, rank))[0]

    async def ask_each(self, command: Command, kind: type[_Body], rank: int | None = None) -> list[_Body]:
        """As `ask`, but return the result of each rank asked."""
        pending = await self._supervisor.send(command, rank)
        await pending.done.wait()
        return pending.results(kind)

    async def cancel(self, id: int) -> None:
        """Have the workers end command `id` at its next step. Cannot be cancelled: a worker without the message would
        compute on."""
        await self._supervisor.tell(Stop(id))

    async def _run(self) -> None:
        """Supervise the workers."""
        await self._supervisor.run()

    def _descriptors(self) -> tuple[int, ...]:
        """Return what the workers of a group inherit that is about to be started."""
        self._meeting = f"{MEETING}{secrets.token_hex(8)}"
        return self._buffers.fds

    @abstractmethod
    def _first_message(self, rank: int) -> FirstMessage:
        """Return the first message to a worker of the group."""
