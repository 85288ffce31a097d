"""The order in which a stage's worker runs its commands.

A backward runs before every forward: it frees memory, and the stage upstream waits for it. A command that changes or
reads the state of the whole stage keeps its place among all others. Only an inner step overtakes: it is asked for when
enough gradients are counted, and more would join them.
"""

from __future__ import annotations

import heapq
from typing import TypeGuard

from peer.ipc.stage_messages import RunBackward, RunForward, RunStep, StageCommand
from peer.ipc.stage_spec import PassKey

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
