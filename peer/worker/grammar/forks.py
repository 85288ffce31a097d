"""The processes of answers: a "grammar" program that has read the vocabulary forks one for each socket it is sent."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from peer.errors import ConfigError, WorkerError
from peer.ipc.grammar_messages import GrammarBounds, GrammarCommand, LoadGrammar
from peer.ipc.messages import WorkerReply
from peer.notifier import Notifier
from peer.worker.process import MessageStream, WorkerProcess
from peer.worker.text_client import result_of, start_program

COMMAND_S: Final = 20.0
"""More than its time of the processor, as other processes may need the cores."""
_END_S: Final = 30.0
_Body = TypeVar("_Body")


@dataclass(frozen=True)
class ForkKind:
    """How much some forks may take."""

    bounds: GrammarBounds
    most: int
    """So many exist at once; for one more, that ends which rested longest."""


class AnswerFork:
    """The process of one answer. It answers one command at a time, and ends with its socket."""

    def __init__(self, sock: socket.socket, kind: ForkKind, forks: AnswerForks) -> None:
        self.kind: Final = kind
        self.stream: Final = MessageStream.of(sock)
        self._forks, self._start = forks, forks.starts
        self._has_ended = False
        self._ids = itertools.count()

    @property
    def is_lost(self) -> bool:
        """Whether the program has ended. This process may have ended with it, and not over its command."""
        return self._forks.starts != self._start or self._forks.has_ended

    @property
    def is_ended(self) -> bool:
        return self._has_ended or self._forks.starts != self._start

    async def ask(self, make: Callable[[int], GrammarCommand], body: type[_Body]) -> _Body | None:
        """Return the answer to the command that `make` makes of an id; None if the process ended over it, or took too
        long, and ends now. Raises TextRefused; the process ends then, too."""
        command = make(next(self._ids))
        self._forks.note_busy(self)
        reply = None
        try:
            with trio.move_on_after(COMMAND_S):
                await self.stream.send(command)
                message = await self.stream.receive()
                if isinstance(message, WorkerReply) and message.id == command.id:
                    reply = message
        finally:
            if reply is None or reply.error is not None:
                self.end()
            else:
                self._forks.note_resting(self)
        return None if reply is None else result_of(reply, body)

    def end(self) -> None:
        """End the process, after its command if it has one."""
        if not self._has_ended:
            self._has_ended = True
            self._forks.part_with(self)


class _Starting:
    """A start under way."""

    def __init__(self) -> None:
        self.is_done = trio.Event()
        self.error: ConfigError | WorkerError | None = None


class AnswerForks:
    """A program and its forks."""

    def __init__(self, load: Callable[[int], LoadGrammar], kinds: Sequence[ForkKind], nursery: trio.Nursery) -> None:
        """`load`: makes the first message with the descriptor over which sockets come; its bounds are those of
        `kinds`."""
        self.starts = 0
        """How often the program was started."""
        self._load, self._kinds, self._nursery = load, list(kinds), nursery
        self._worker: WorkerProcess | None = None
        self._sockets: socket.socket | None = None
        self._starting: _Starting | None = None
        self._turns = {kind: trio.Lock() for kind in kinds}
        self._living = set[AnswerFork]()
        self._resting = dict[AnswerFork, None]()  # without a command, in the order of their last one
        self._ended = Notifier()

    @property
    def pid(self) -> int | None:
        """The process id of the program; None while there is none."""
        return None if self._worker is None else self._worker.pid

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended. Its forks end with the next start."""
        if self._sockets is None:
            return True
        try:
            return not self._sockets.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def living(self, kind: ForkKind) -> int:
        """Return how many forks of a kind there are."""
        return sum(fork.kind is kind for fork in self._living)

    async def fork(self, kind: ForkKind) -> AnswerFork:
        """Return the process of a new answer. Raises ConfigError if the program does not take its vocabulary,
        WorkerError."""
        while self._sockets is None or self.has_ended or self.living(kind) >= kind.most:
            await self._started()
            if not await self._has_room(kind):
                raise WorkerError(f"{kind.most} answers compile schemas as large as this one: try again later")
        ours, theirs = socket.socketpair()
        fork = AnswerFork(ours, kind, self)
        with theirs, suppress(OSError):  # of a program that has ended: so has the fork, as its socket tells
            socket.send_fds(self._sockets, [bytes([self._kinds.index(kind)])], [theirs.fileno()])
        self._living.add(fork)
        return fork

    async def _has_room(self, kind: ForkKind) -> bool:
        """Wait until there may be one more; return whether that is so in time."""
        with trio.move_on_after(COMMAND_S):
            async with self._turns[kind]:
                while self.living(kind) >= kind.most:
                    resting = next((fork for fork in self._resting if fork.kind is kind), None)
                    if resting is not None:
                        resting.end()
                    await self._ended.wait()
        return self.living(kind) < kind.most

    def note_busy(self, fork: AnswerFork) -> None:
        """Note that a fork has a command."""
        self._resting.pop(fork, None)

    def note_resting(self, fork: AnswerFork) -> None:
        """Note that a fork has no command."""
        if fork in self._living:
            self._resting[fork] = None

    def part_with(self, fork: AnswerFork) -> None:
        """Have a fork end, and count it until it has."""
        self.note_busy(fork)
        if fork in self._living:
            self._nursery.start_soon(self._await_end, fork)

    async def close(self) -> None:
        """End the program and its forks."""
        with trio.CancelScope(shield=True):
            living, self._living = self._living, set[AnswerFork]()
            self._resting.clear()
            for fork in living:
                await fork.stream.aclose()
            if self._sockets is not None:
                self._sockets.close()
                self._sockets = None
            if self._worker is not None:
                await self._worker.destroy()
                self._worker = None
            self._ended.notify()

    async def _started(self) -> None:
        """Wait until the program runs. Its start continues if the caller is cancelled."""
        if not self.has_ended:
            return
        if self._starting is None:
            self._starting = _Starting()
            self._nursery.start_soon(self._start, self._starting)
        starting = self._starting
        await starting.is_done.wait()
        if starting.error is not None:
            raise starting.error

    async def _start(self, starting: _Starting) -> None:
        try:
            await self.close()
            self.starts += 1
            with ExitStack() as held:
                ours, theirs = socket.socketpair()
                held.callback(ours.close)
                with theirs:
                    self._worker = await start_program(self._load(theirs.fileno()), (theirs.fileno(),))
                held.pop_all()
            ours.setblocking(False)
            self._sockets = ours
        except (ConfigError, WorkerError) as error:
            starting.error = error
        except OSError as error:
            starting.error = WorkerError(f"the process for grammars does not start ({error}): free some memory")
        finally:
            self._starting = None
            starting.is_done.set()

    async def _await_end(self, fork: AnswerFork) -> None:
        """Read what a fork still says. One that does not end takes the whole program with it."""
        with trio.move_on_after(_END_S) as limit:
            await fork.stream.send_end()
            while await fork.stream.receive() is not None:
                pass
        await fork.stream.aclose()
        if limit.cancelled_caught and fork in self._living:
            await self.close()
        self._living.discard(fork)
        self._ended.notify()
