"""Where all groups of a run are: the only thing that the coordinator of one group needs to know of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import trio

from swarm.pipeline.config import STALENESS
from swarm.protocol.head import Head


class GroupStatus(Protocol):
    """One group, as seen from the others."""

    @property
    def group(self) -> str: ...

    @property
    def head(self) -> Head: ...

    @property
    def peers(self) -> int: ...

    @property
    def completed(self) -> trio.Event: ...


class RunProgress:
    """The groups of one run. Each group adds itself. A run that is not a pipeline has one."""

    def __init__(self, *, synchronous: bool = False, source: str = "", rounds: int = 0) -> None:
        """`synchronous`: weights change at commits only. `source`: the id of the group that dispatches samples.
        `rounds`: how many the run has, 0 if it has no end."""
        self._groups: list[GroupStatus] = []
        self._synchronous, self._source, self._rounds = synchronous, source, rounds

    def add(self, group: GroupStatus) -> None:
        """Add a group."""
        self._groups.append(group)

    @property
    def peers(self) -> int:
        """How many peers take part or wait, in all groups."""
        return sum(group.peers for group in self._groups)

    @property
    def completed(self) -> bool:
        """Whether all groups have made their last commit."""
        return all(group.completed.is_set() for group in self._groups)

    def is_member_beside(self, group: str, peer: str) -> bool:
        """Return whether a peer is a member of another group than that one."""
        heads = [other.head for other in self._groups if other.group != group]
        return any(member.peer == peer for head in heads for member in head.members)

    def fast_forward(self, head: Head) -> Head:
        """Return `head`, of one group, at the position of the other groups if it is too old for them."""
        others = [other.head for other in self._groups if other.group != head.run_id]
        dispatches = head.run_id == self._source
        return fast_forward(head, others, self._synchronous, dispatches, self._rounds) if others else head


def fast_forward(head: Head, others: Sequence[Head], synchronous: bool, dispatches: bool, rounds: int = 0) -> Head:
    """Return the weights of a stage at the position of the `others`, if they are too old for it. `rounds`: how many the
    run has, 0 if it has no end.

    In a synchronous run that is the position of the stage furthest behind: the other stages keep the weights of its
    epoch. The stage that `dispatches` samples skips those that another stage has merged. They would not be counted
    there again, and the run would wait for rounds in which nothing counts.
    """
    last, furthest = min(others, key=lambda head: head.round), max(others, key=lambda head: head.round)
    if furthest.round - head.round <= STALENESS:
        return head
    if synchronous:
        ledger = head.ledger.freeing(last.ledger.cursor, last.ledger.returned)
        return msgspec.structs.replace(head, round=last.round, inner_step=last.inner_step, ledger=ledger)
    if dispatches:
        ledger = head.ledger.after(other.ledger for other in others)
        return msgspec.structs.replace(head, round=furthest.round, inner_step=furthest.inner_step, ledger=ledger)
    # A later stage still has the run's last round to make: that one settles what it has not merged.
    number = min(furthest.round, rounds - 1) if rounds else furthest.round
    return msgspec.structs.replace(head, round=number, inner_step=furthest.inner_step)
