"""Supervision of a group of worker processes: start, dispatch of commands and replies, and replacement.

One rank that dies or hangs ends the whole group, and all ranks are started again. That costs the commands in flight,
which fail with a WorkerError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from peer.catalogue.machine import WorkerDied, WorkerFailed, WorkerReady
from peer.confinement.private_network import MACHINES, open_private_network
from peer.errors import ConfigError, ResourceError, StageRefused, WorkerError
from peer.ipc.messages import Beat, Command, ModelLoaded, Stop, WorkerEvent, WorkerReply
from peer.machine import usable_cores
from peer.worker.launch import WorkerLaunch
from peer.worker.process import WorkerProcess, handshake

_BACKOFF_MAX_S = 30.0
_LISTEN_S = 1.0
_Body = TypeVar("_Body")


@dataclass
class Pending:
    """A command that was sent to workers and awaits their replies."""

    waiting: set[int]
    """The ranks that have not replied."""
    on_settled: Callable[[], None] | None = None
    """Called once, when all ranks have replied or the group is lost."""
    done: trio.Event = field(default_factory=trio.Event)
    replies: dict[int, WorkerReply] = field(default_factory=dict)
    error: WorkerError | None = None

    def take(self, rank: int, reply: WorkerReply) -> None:
        """Note a reply; the last one settles the command."""
        self.replies[rank] = reply
        self.waiting.discard(rank)
        if not self.waiting:
            self._settle()

    def fail(self, error: WorkerError) -> None:
        """Settle the command with an error."""
        self.error = error
        self._settle()

    def results(self, kind: type[_Body]) -> list[_Body]:
        """Return the result of each rank, in order of ranks. Raises WorkerError, StageRefused."""
        if self.error is not None:
            raise self.error
        replies = [self.replies[rank] for rank in sorted(self.replies)]
        for reply in replies:
            if reply.error is not None:
                raise StageRefused(reply.error.message, reply.error.reason)
        return [reply.result(kind) for reply in replies]

    def _settle(self) -> None:
        self.done.set()
        if self.on_settled is not None:
            self.on_settled()


class Supervisor:
    """Keeps the workers of one group running, and settles commands with their replies or with their loss."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self.loaded: ModelLoaded | None = None
        self.workers: tuple[WorkerProcess, ...] = ()  # by rank; empty while a group is being started
        self.generation = 0  # the number of groups lost
        self.loss: WorkerError | None = None  # how the last of them was lost
        self._launch = launch
        self._pending: dict[int, Pending] = {}  # by command id
        self._started = trio.Event()  # set and replaced after each attempt to start the group
        self._start_error: WorkerError | None = None
        self._closed = False
        self._alive = trio.CancelScope()  # of what keeps a group running
        self._wanted = trio.Event()  # whether there is to be a group
        self._wanted.set()
        self._ended = trio.Event()  # whether the group of before `suspend` has ended

    async def start(self) -> None:
        """Start the first group, unless there is to be none. Raises WorkerError or ConfigError."""
        if self._wanted.is_set():
            self.workers = await self._start_group()

    async def suspend(self) -> None:
        """Kill the workers and start no others before `resume`: until then every command fails. Returns once the
        processes are gone; `run` must be running."""
        self.suspend_soon()
        await self._ended.wait()

    def suspend_soon(self) -> None:
        """As `suspend`, without waiting; also before `start`."""
        if self._wanted.is_set():
            self._wanted, self._ended = trio.Event(), trio.Event()
            self._alive.cancel()

    def resume(self) -> None:
        """Have a group again."""
        if not self._wanted.is_set():
            self._started, self._start_error = trio.Event(), None
            self._wanted.set()

    async def ready(self) -> tuple[WorkerProcess, ...]:
        """Wait for the workers and return them. Raises WorkerError if the next start fails."""
        while not (self.workers or self._closed):
            await self._started.wait()
            if self._start_error is not None:
                raise self._start_error
        if self._closed:
            raise _closing()
        return self.workers

    async def send(
        self,
        command: Command,
        rank: int | None = None,
        *,
        after: Callable[[], Stop | None] = lambda: None,
        on_settled: Callable[[], None] | None = None,
    ) -> Pending:
        """Send the command to one rank, or to all (None), once there are workers. `after` may give a stop to send
        before the command. Raises WorkerError."""
        workers = await self.ready()
        ranks = range(len(workers)) if rank is None else (rank,)
        pending = self._pending[command.id] = Pending(set(ranks), on_settled)  # from here on a lost group settles it
        stop = after()
        messages = (command,) if stop is None else (stop, command)
        with trio.CancelScope(shield=True):  # half a message would break the protocol
            for number in ranks:
                await workers[number].send(*messages)
        return pending

    async def tell(self, message: Stop | Command) -> None:
        """Send a message to the live workers, without waiting for replies. Cannot be cancelled."""
        with trio.CancelScope(shield=True):
            for worker in self.workers:
                await worker.send(message)

    def condemn(self, error: Exception) -> None:
        """Kill the live workers, since one has sent what is malformed by other ways than its socket."""
        for worker in self.workers:
            worker.condemn(error)

    async def close(self) -> None:
        """Kill the workers."""
        await self._destroy(self.workers)

    async def run(self) -> None:
        """Serve the group until a rank dies, replace the group, and repeat; while suspended, have none. Raises
        WorkerError after too many failed starts in a row."""
        try:
            while True:
                if not self._wanted.is_set():
                    await self._hold()
                self._alive = trio.CancelScope()
                with self._alive:
                    await self._keep_alive()
        finally:  # a caller shielded from the cancellation would wait without end
            self._closed = True
            self._started.set()
            self._fail_all(_closing())

    async def _keep_alive(self) -> None:
        while True:
            if not self.workers:
                await self._restart()
            worker, cause = await self._serve(self.workers)
            self._launch.events.emit(WorkerDied(pid=worker.pid, cause=cause))
            self._lose(WorkerError(f"the compute worker was lost: {cause}; a new one is starting"))

    async def _hold(self) -> None:
        """End the workers, and wait until there are to be some again."""
        workers, paused = self.workers, WorkerError("the compute worker was ended: this machine's owner has paused it")
        self._lose(paused)
        self._start_error = paused  # for those that wait for workers
        self._started.set()
        await self._destroy(workers)
        self._ended.set()
        await self._wanted.wait()

    def _lose(self, error: WorkerError) -> None:
        """Have no workers any more; what they were asked fails."""
        self.workers, self._started, self._start_error = (), trio.Event(), None
        self.generation += 1
        self.loss = error
        self._fail_all(error)

    def _fail_all(self, error: WorkerError) -> None:
        pending, self._pending = self._pending, {}
        for command in pending.values():
            command.fail(error)

    async def _start_group(self) -> tuple[WorkerProcess, ...]:
        """Start all ranks and wait until each has loaded. Raises WorkerError, ConfigError or ResourceError."""
        launch, size = self._launch, self._launch.world_size
        started = trio.current_time()
        fds = launch.open_descriptors()
        threads = launch.threads or max(1, usable_cores() // size)
        workers: list[WorkerProcess] = []
        network = await trio.to_thread.run_sync(open_private_network) if size > 1 else MACHINES
        try:
            with closing(network):
                for rank in range(size):
                    log = launch.directory / ("worker.log" if rank == 0 else f"worker-{rank}.log")
                    workers.append(WorkerProcess.start(log, launch.private_folder, threads, fds, launch.nice, network))
            answers = await self._load(workers)
        except BaseException:
            await self._destroy(workers)
            raise
        self.loaded = answers[0]
        for worker, answer in zip(workers, answers, strict=True):
            launch.events.emit(
                WorkerReady(
                    pid=worker.pid,
                    device=answer.device,
                    memory_bytes=answer.memory_bytes,
                    bf16=answer.bf16,
                    fp16=answer.fp16,
                    compiled=answer.compiled,
                    sequences=None if answer.step_size is None else answer.step_size.sequences,
                    recompute=None if answer.step_size is None else answer.step_size.recompute,
                    seconds=round(trio.current_time() - started, 3),
                )
            )
        if self.loaded.corpus is not None:
            launch.events.emit(self.loaded.corpus.event())
        return tuple(workers)

    async def _load(self, workers: list[WorkerProcess]) -> list[ModelLoaded]:
        """Send each rank its first message and wait for the answers. Raises WorkerError or ConfigError."""
        answers: dict[int, ModelLoaded] = {}
        errors: list[WorkerError | ConfigError] = []

        async def load(rank: int) -> None:
            try:
                message = self._launch.first_message(rank)
                answer = await handshake(workers[rank], message, self._launch.load_timeout_s, self._launch.events)
            except WorkerError as error:
                errors.append(error)
            else:
                if isinstance(answer, ModelLoaded):
                    answers[rank] = answer
                    return
                errors.append(ConfigError(answer.message))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for rank in range(len(workers)):
                nursery.start_soon(load, rank)
        if errors:
            raise errors[0]
        return [answers[rank] for rank in range(len(workers))]

    async def _restart(self) -> None:
        backoff_s, failed = 0.5, 0
        while not self.workers:
            try:
                self.workers, self._start_error = await self._start_group(), None
            except (WorkerError, ConfigError, ResourceError) as error:
                self._start_error = WorkerError(str(error))
                self._launch.events.emit(WorkerFailed(cause=str(error), retry_s=backoff_s))
                failed += 1
            self._started.set()
            starts_max = self._launch.starts_max
            if self._start_error is not None and starts_max is not None and failed >= starts_max:
                raise WorkerError(
                    f"the compute worker failed to start {failed} times in a row ({self._start_error}): repair the "
                    "cause and join again with the same --home; other peers take over meanwhile"
                )
            if not self.workers:
                await trio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)
                self._started = trio.Event()

    async def _serve(self, workers: tuple[WorkerProcess, ...]) -> tuple[WorkerProcess, str]:
        """Dispatch messages until a rank dies or hangs, then kill the others. Returns the first to go, and the cause as
        a sentence about "it"."""
        ended: list[tuple[WorkerProcess, str]] = []

        async def listen(rank: int, worker: WorkerProcess) -> None:
            ended.append((worker, await self._listen(rank, worker)))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for rank, worker in enumerate(workers):
                nursery.start_soon(listen, rank, worker)
        await self._destroy(workers)
        return ended[0]

    async def _listen(self, rank: int, worker: WorkerProcess) -> str:
        """Dispatch the messages of one rank until it dies or hangs; returns the cause."""
        launch = self._launch
        ticks, moved_at = -1, trio.current_time()
        while True:
            quiet_s = 0.0  # counted in short waits: a time in which this process was frozen is not the worker's silence
            while quiet_s < launch.silence_s:
                with trio.move_on_after(_LISTEN_S) as timeout:
                    message = await worker.receive()
                if not timeout.cancelled_caught:
                    break
                quiet_s += _LISTEN_S
            else:
                await worker.destroy()
                return f"it was silent for {launch.silence_s:g} s and was killed"
            if message is None:
                return await worker.exit_diagnosis()
            if isinstance(message, WorkerEvent):
                launch.events.emit(message.name, **message.fields)
            elif isinstance(message, Beat):
                owes = launch.steps_always or any(rank in command.waiting for command in self._pending.values())
                if message.ticks != ticks or not owes:
                    ticks, moved_at = message.ticks, trio.current_time()
                elif trio.current_time() - moved_at > launch.stall_s:
                    await worker.destroy()
                    return f"it made no step for {launch.stall_s:g} s and was killed (raise stall_s if steps are slow)"
            elif isinstance(message, WorkerReply):
                self._settle(rank, message)

    def _settle(self, rank: int, reply: WorkerReply) -> None:
        pending = self._pending.get(reply.id)
        if pending is not None:
            if pending.waiting == {rank}:
                del self._pending[reply.id]
            pending.take(rank, reply)

    @staticmethod
    async def _destroy(workers: Iterable[WorkerProcess]) -> None:
        for worker in workers:
            await worker.destroy()


def _closing() -> WorkerError:
    return WorkerError("the worker group is being closed: send no more commands")
