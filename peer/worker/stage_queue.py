"""In which order a stage's worker runs what it was asked.

A backward goes before every forward: it frees memory, and somebody upstream waits for it. What changes or takes the
state of the whole stage keeps its place: all that was asked before it runs before it, all that was asked after, after.
Only a step by the stage's own gradient goes first: it is asked for when enough is counted, and more would come in.
"""

from __future__ import annotations

import heapq
from typing import TypeGuard

from peer.ipc.stage_messages import RunBackward, RunForward, RunStep, StageCommand
from peer.ipc.stage_spec import PassKey

_Entry = tuple[int, int, int, StageCommand]  # section, rank, number: no two are alike, so commands are never compared


def _belongs(command: StageCommand, key: PassKey) -> TypeGuard[RunForward | RunBackward]:
    if isinstance(command, RunForward):
        return command.keep and command.micro_batch.key == key
    return isinstance(command, RunBackward) and command.micro_batch.key == key


def _rank(command: StageCommand) -> int | None:
    """The lowest goes first; None: it keeps its place."""
    if isinstance(command, RunForward):
        return 1
    if isinstance(command, RunBackward):
        return 0
    return -1 if isinstance(command, RunStep) and not command.merged else None


class StageQueue:
    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._section = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, command: StageCommand) -> None:
        rank = _rank(command)
        self._section += rank is None  # such a command has a section of its own
        self._number += 1
        heapq.heappush(self._heap, (self._section, rank or 0, self._number, command))
        self._section += rank is None

    def pop(self) -> StageCommand:
        """The next command; IndexError if there is none."""
        return heapq.heappop(self._heap)[-1]

    def withdraw(self, key: PassKey) -> list[RunForward | RunBackward]:
        """Take out what waits for this pass of a micro-batch; not a forward that keeps nothing."""
        found: list[RunForward | RunBackward] = []
        kept: list[_Entry] = []
        for entry in self._heap:
            command = entry[-1]
            if _belongs(command, key):
                found.append(command)
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
        return found
