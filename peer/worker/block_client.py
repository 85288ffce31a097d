"""The network process's handle on the "blocks" program: records to and from a worker that serves a span of blocks.

Records go through two rings of shared memory and touch no tensor library on this side: hidden states are bytes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import trio

from peer.config import HiddenType, ModelConfig, Quantization
from peer.errors import StageRefused, WorkerError
from peer.events import EventLog
from peer.ipc.block_messages import (
    CHUNK_TOKENS,
    ROWS_MAX,
    CloseSession,
    FromBlocks,
    LoadAdapter,
    LoadBlocks,
    RingEnds,
    ToBlocks,
    WorkerLoad,
    pack,
    ring_bytes,
    unpack_from_worker,
)
from peer.ipc.ring import Piece, Ring
from peer.ipc.span import Span
from peer.notifier import Notifier
from peer.worker.launch import WorkerLaunch
from peer.worker.process import make_private
from peer.worker.supervisor import Supervisor

_STARTS_MAX: Final = 5  # some 8 s plus the starts: clients expect a server's part, and do without a server that left


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The blocks that a worker serves, and its device."""

    model: ModelConfig
    span: Span
    dtype: HiddenType
    window: int | None
    """How many tokens a token sees, itself included; None for all."""
    folders: tuple[Path, ...]
    """The folders of .safetensors files to read the parameters from; the first that holds a parameter counts."""
    directory: Path
    """Takes worker.log and, for the worker, `private_folder`."""
    events: EventLog
    device: str = "auto"
    threads: int | None = None
    """None: the cores that this process may use."""
    pages: int
    """Of all sessions' keys and values together, 16 tokens each."""
    rows_max: int = ROWS_MAX
    """Sessions that generate in one step."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens of a prompt in one step."""
    silence_s: float = 15.0
    """A worker silent for this long is hung (stopped, or swapped out) and is killed."""
    stall_s: float = 300.0
    """A worker whose step takes this long is killed."""
    load_timeout_s: float = 600.0
    quantization: Quantization | None = None
    """Of the matrices inside of the blocks."""
    adapters: tuple[LoadAdapter, ...] = ()
    """What sessions may choose, by number."""
    gives_way: bool = False
    """Whether a worker that trains on the same processors goes first."""

    @property
    def private_folder(self) -> Path:
        """The one folder that the worker may write: its home, and temporary files."""
        return self.directory.absolute() / "worker"


class _Rings(NamedTuple):
    to_worker: Ring
    from_worker: Ring


class BlockWorkerGroup:
    """Sessions in the worker of a span of blocks; from `open`. One task receives.

    A worker that crashes, hangs or sends a malformed record is replaced at once, and all its sessions are gone:
    `generation` has grown, and `receive` raises WorkerError, once. Earlier records were for the lost worker; until then
    `send` raises WorkerError, and afterwards until the new worker has loaded. So no record of a lost session reaches
    the new worker.
    """

    def __init__(self, config: BlockConfig) -> None:
        self.config = config
        self.load: WorkerLoad | None = None
        """The worker's last report; None before."""
        self._rings: _Rings | None = None
        self._replaced = Notifier()  # notified with new rings
        self._unsent: deque[bytes] = deque()  # ends of sessions that the ring had no room for
        self._told = 0  # the generation whose loss `receive` has raised
        self._closed = False
        self._supervisor = Supervisor(
            WorkerLaunch(
                directory=config.directory,
                private_folder=config.private_folder,
                events=config.events,
                open_descriptors=self._open_rings,
                first_message=lambda rank: self._load_blocks(),
                threads=config.threads,
                silence_s=config.silence_s,
                stall_s=config.stall_s,
                load_timeout_s=config.load_timeout_s,
                starts_max=_STARTS_MAX,
                steps_always=True,
            )
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, config: BlockConfig) -> AsyncIterator[BlockWorkerGroup]:
        """Start the worker and keep one running for as long as the block lasts.

        Raises ConfigError if the parameters or the device do not do, WorkerError if the worker dies while it loads or
        cannot be replaced, ResourceError if there is no memory for the rings.
        """
        make_private(config.private_folder)
        group = cls(config)
        try:
            await group._supervisor.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(group._supervisor.run)
                try:
                    yield group
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            await group._supervisor.close()
            group._closed = True
            group._close_rings()
            group._replaced.notify()

    @property
    def generation(self) -> int:
        """The number of workers lost. It grows before `receive` raises WorkerError."""
        return self._supervisor.generation

    @property
    def worker_pid(self) -> int | None:
        """The process id of the live worker; None while one is being started."""
        return next((worker.pid for worker in self._supervisor.workers), None)

    @property
    def device(self) -> str:
        """The name of the device that the worker computes on."""
        return "" if self._supervisor.loaded is None else self._supervisor.loaded.device

    async def ready(self) -> None:
        """Wait until a worker has loaded. Raises WorkerError if the next start fails; another one follows."""
        await self._supervisor.ready()

    def send(self, message: ToBlocks, payload: Piece = b"") -> None:
        """Send a record, in order, without waiting. If there is no room for it now, a CloseSession is kept until there
        is, and any other record raises StageRefused ("full"): send it again later. Raises WorkerError if no worker
        lives, ValueError for a record larger than half of a ring (`ring_bytes`: at least two chunks of a prompt)."""
        rings = self._rings
        if rings is None or not self._supervisor.workers or self._told != self.generation:
            raise WorkerError("no compute worker lives now: open the sessions again when there is one")
        if self._flush(rings) and rings.to_worker.put(pack(message), payload):
            return
        if not isinstance(message, CloseSession):
            raise StageRefused("the compute worker has too many records to read: send this one again later", "full")
        self._unsent.append(pack(message))

    async def receive(self) -> list[tuple[FromBlocks, bytes]]:
        """Wait for records, and return all that have come, with copies of their payloads. A WorkerLoad is not among
        them: it is in `load`. Raises WorkerError once for a lost worker, trio.ClosedResourceError if the group is
        closed."""
        while True:
            await self._wait()
            if self._closed:
                raise trio.ClosedResourceError("the worker group is closed")
            if self._told != self.generation:
                self._told = self.generation
                assert self._supervisor.loss is not None
                raise WorkerError(str(self._supervisor.loss))
            if self._rings is None:
                continue
            self._flush(self._rings)
            if found := self._take(self._rings):
                return found

    async def _wait(self) -> None:
        """Wait until records may have come, or the worker was lost."""
        if self._closed or self._told != self.generation:
            await trio.lowlevel.checkpoint()
        elif self._rings is None:
            await self._replaced.wait()
        else:
            with suppress(trio.ClosedResourceError):  # the rings were replaced meanwhile
                await trio.lowlevel.wait_readable(self._rings.from_worker.fds[1])

    def _take(self, rings: _Rings) -> list[tuple[FromBlocks, bytes]]:
        """Take what has come. A worker that has sent what is malformed is killed."""
        load, found = self._load_blocks(), list[tuple[FromBlocks, bytes]]()
        try:
            for record in rings.from_worker.take():
                message, payload = unpack_from_worker(record, load)
                if isinstance(message, WorkerLoad):
                    self.load = message
                else:
                    found.append((message, payload))
        except (ValueError, WorkerError) as error:
            self._supervisor.condemn(error)
            self._close_rings()
            return []
        rings.from_worker.done()
        return found

    def _flush(self, rings: _Rings) -> bool:
        """Send the ends of sessions that are unsent; return whether all are sent."""
        while self._unsent:
            if not rings.to_worker.put(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def _open_rings(self) -> tuple[int, ...]:
        """Open rings for a new worker; what a lost one left in the old ones is never read. Raises ResourceError."""
        self._close_rings()
        config = self.config
        size = ring_bytes(config.model, config.chunk_tokens)
        to_worker = Ring.create(config.directory, size)
        try:
            from_worker = Ring.create(config.directory, size)
        except BaseException:
            to_worker.close()
            raise
        self._rings = _Rings(to_worker, from_worker)
        self._replaced.notify()
        return (*to_worker.fds, *from_worker.fds)

    def _close_rings(self) -> None:
        self.load = None
        self._unsent.clear()
        if self._rings is not None:
            trio.lowlevel.notify_closing(self._rings.from_worker.fds[1])
            for ring in self._rings:
                ring.close()
            self._rings = None

    def _load_blocks(self) -> LoadBlocks:
        assert self._rings is not None
        config = self.config
        to_worker, from_worker = (RingEnds(ring.fds, ring.size_bytes) for ring in self._rings)
        return LoadBlocks(
            model=config.model,
            span=config.span,
            dtype=config.dtype,
            window=config.window,
            folders=tuple(str(folder.absolute()) for folder in config.folders),
            directory=str(config.private_folder),
            device=config.device,
            pages=config.pages,
            rows_max=config.rows_max,
            chunk_tokens=config.chunk_tokens,
            to_worker=to_worker,
            from_worker=from_worker,
            quantization=config.quantization,
            adapters=config.adapters,
            gives_way=config.gives_way,
        )
