"""The order in which a stage's worker runs its commands.

A backward runs before every forward: it frees memory, and the stage upstream waits for it. A command that changes or
reads the state of the whole stage keeps its place among all others. Only an inner step overtakes: it is asked for when
enough gradients are counted, and more would join them.

Of several ranks the first one decides. Commands reach the ranks at different times, and all must compute them in one
order: each of them is a collective.
"""

from __future__ import annotations

import heapq
import queue
from collections import deque
from typing import NamedTuple, TypeGuard

from peer.ipc.stage_messages import DropMicroBatch, RunBackward, RunForward, RunStep, StageCommand
from peer.ipc.stage_spec import PassKey
from peer.parallel.ranks import Ranks

_Entry = tuple[int, int, int, StageCommand]  # section, rank, number: unique, so commands are never compared


def _belongs(command: StageCommand, key: PassKey) -> TypeGuard[RunForward | RunBackward]:
    if isinstance(command, RunForward):
        return command.keep and command.micro_batch.key == key
    return isinstance(command, RunBackward) and command.micro_batch.key == key


def _rank(command: StageCommand) -> int | None:
    """Return the rank of the command, lowest first; None if it keeps its place."""
    if isinstance(command, RunForward):
        return 1
    if isinstance(command, RunBackward):
        return 0
    return -1 if isinstance(command, RunStep) else None


class StageQueue:
    """Commands that wait, in the order of execution."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._section = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, command: StageCommand) -> None:
        rank = _rank(command)
        self._section += rank is None  # a command without a rank forms its own section
        self._number += 1
        heapq.heappush(self._heap, (self._section, rank or 0, self._number, command))
        self._section += rank is None

    def pop(self) -> StageCommand:
        """Remove and return the next command. Raises IndexError if there is none."""
        return heapq.heappop(self._heap)[-1]

    def withdraw(self, key: PassKey) -> list[RunForward | RunBackward]:
        """Remove and return the commands of this pass of a micro-batch, but not a forward that keeps nothing."""
        found: list[RunForward | RunBackward] = []
        others: list[_Entry] = []
        for entry in self._heap:
            command = entry[-1]
            if _belongs(command, key):
                found.append(command)
            else:
                others.append(entry)
        heapq.heapify(others)
        self._heap = others
        return found


class Turn(NamedTuple):
    """The command whose turn it is."""

    command: StageCommand
    withdrawn: bool
    """It is to be refused, as its micro-batch was dropped before; of a drop: it has withdrawn another command."""


class StageTurns:
    """The turns of the commands that come in by `commands`: the same at all ranks."""

    def __init__(self, commands: queue.SimpleQueue[StageCommand], ranks: Ranks) -> None:
        self._commands = commands
        self._ranks = ranks
        self._queue = StageQueue()  # of the first rank
        self._at_once: deque[Turn] = deque()  # before what is in the queue
        self._come: dict[int, StageCommand] = {}  # to another rank, by id

    def next(self) -> Turn:
        """Wait for the next turn."""
        if self._ranks.rank == 0:
            turn = self._decided()
            self._ranks.sum((turn.command.id, turn.withdrawn))
            return turn
        if not self._come:  # not in the collective: there a rank waits for a minute at most
            self._receive()
        id, withdrawn = map(int, self._ranks.sum((0, 0)))
        while id not in self._come:
            self._receive()
        return Turn(self._come.pop(id), bool(withdrawn))

    def _receive(self) -> None:
        command = self._commands.get()
        self._come[command.id] = command

    def _decided(self) -> Turn:
        self._listen()
        return self._at_once.popleft() if self._at_once else Turn(self._queue.pop(), False)

    def _listen(self) -> None:
        """Move all commands that have come into the queue; wait only if there are none."""
        while True:
            try:
                command = self._commands.get(block=not (self._at_once or len(self._queue)))
            except queue.Empty:
                return
            if not isinstance(command, DropMicroBatch):
                self._queue.push(command)
                continue
            withdrawn = self._queue.withdraw(command.key)
            self._at_once.extend(Turn(waiting, True) for waiting in withdrawn)
            self._at_once.append(Turn(command, bool(withdrawn)))
