"""Keeps the weights in a stage's worker at those of the group's head, through commits and lost workers.

    commit of epoch e --adopt--> worker's weights, accounting --> server takes calls of epoch e

The worker's weights are changed by one task only (`_keep_in_sync`), never by a round, which may be cancelled. The
differences between the two modes are left to subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import torch
import trio

from peer.catalogue.machine import WorkerFailed
from peer.catalogue.stages import PipelineLost
from peer.errors import StageRefused, WorkerError
from peer.notifier import Notifier
from swarm.pipeline.stage_server import StageServer
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, count, union, without
from swarm.protocol.round_schedule import RoundSchedule

WATCH_S: Final = 0.5  # between two looks for a lost worker while there is no other work


@dataclass(frozen=True)
class Adoption:
    """A head whose outer weights the worker is to take over."""

    theta: torch.Tensor
    head: Head
    replaced: bool
    """The state was fetched or replayed: what was learned since the last commit is void."""
    same: bool
    """The worker has these weights already."""
    orphaned: bool
    """The weights are the same, but none of the members that had committed them is left."""


class WeightSync(ABC):
    """The worker's weights at one replica. `head` is None until the first ones are imported."""

    def __init__(self, server: StageServer, schedule: RoundSchedule) -> None:
        self.head: Head | None = None
        self._server, self._schedule = server, schedule
        self._worker_group, self._accounting = server.worker_group, server.accounting
        self._events = server.host.events
        self._adoption: Adoption | None = None
        self._generation = -1  # of the worker that has the weights of `head`
        self._lock = trio.Lock()  # one change of the worker's weights at a time
        self._changed = Notifier()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Take over the outer weights `theta` of `head` soon. `changed`: where they differ from the last ones; None if
        the state was fetched or replayed."""
        earlier = self._adoption
        replaced = changed is None or (earlier is not None and earlier.replaced)
        same = not replaced and changed == () and earlier is None and self.head is not None
        orphaned = _is_orphaned(head, self.head if earlier is None else earlier.head)
        if earlier is not None and earlier.head.round == head.round:
            orphaned |= earlier.orphaned
        orphaned &= self._schedule.synchronous
        # A copy: the round after the next writes to `theta`.
        self._adoption = Adoption(theta.clone(), head, replaced, same, orphaned)
        self._changed.notify()

    # -- what the modes differ in ------------------------------------------------------------------------------------

    @abstractmethod
    def worker_lost(self) -> None:
        """Forget what a lost worker had counted; the server has done so, too."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget what was counted, captured or not: it was thrown away."""

    @abstractmethod
    def _keeps(self, adoption: Adoption) -> bool:
        """Return whether what was learned since the capture stays, on top of the new weights."""

    @abstractmethod
    def _settle(self) -> None:
        """Account for the captured samples: a commit has merged them or not."""

    async def _load(self, head: Head) -> None:
        """Bring the outer weights, those of `head`, to a worker that has none of this group yet. Raises WorkerError,
        StageRefused."""
        await self._worker_group.import_weights(head.round)

    def _may_step(self) -> bool:
        """Return whether the worker is to make an inner step."""
        return False

    async def _step(self) -> None:
        """Make an inner step. Raises WorkerError, StageRefused."""
        raise AssertionError("weights change at commits only")

    # -- the changes -------------------------------------------------------------------------------------------------

    async def _keep_in_sync(self) -> None:
        """Carry out what is due, until cancelled."""
        while True:
            await self._changed.until(self._is_due, WATCH_S)
            try:
                async with self._lock:
                    await self._catch_up()
            except (WorkerError, StageRefused) as error:
                self._events.emit(WorkerFailed(reason=str(error)))
                await trio.sleep(WATCH_S)

    def _is_due(self) -> bool:
        return self._adoption is not None or self._is_lost() or self._may_step()

    def _is_lost(self) -> bool:
        return self.head is not None and self._generation != self._worker_group.generation

    async def _catch_up(self) -> None:
        """Make the change that is due. Raises WorkerError, StageRefused."""
        if self._adoption is not None:
            await self._take_over(self._adoption)
        elif self._is_lost():
            await self._recover()
        elif self._may_step():
            await self._step()
        self._changed.notify()

    async def _take_over(self, adoption: Adoption) -> None:
        head = adoption.head
        if head.round < 0:  # no state yet: it is about to be fetched
            self._adoption = None if self._adoption is adoption else self._adoption
            return
        moved = self.head is not None and head.round != self.head.round  # the authority may set a stage's round
        if moved or adoption.orphaned or not adoption.same:
            await self._import(adoption)
        self.head = head
        if self._adoption is adoption:
            self._adoption = None

    async def _import(self, adoption: Adoption) -> None:
        head, generation = adoption.head, self._worker_group.generation
        keeps = self._keeps(adoption) and generation == self._generation
        if not keeps:
            await self._throw_away(head)
        await trio.to_thread.run_sync(self._worker_group.outer.copy_, adoption.theta)
        conflicts = self._server.moved(head)
        self.head = head
        if adoption.orphaned or generation != self._generation:
            await self._load(head)
        else:
            await self._worker_group.import_weights(head.round, rebase=keeps)
        self._generation = generation
        self._settle()
        if conflicts:
            self._tell_lost("counted elsewhere too", conflicts)
            await self._start_over()

    async def _recover(self) -> None:
        """Bring the weights of the head to a new worker."""
        assert self.head is not None
        generation = self._worker_group.generation
        self._server.moved(self.head)
        self.worker_lost()
        await self._load(self.head)
        self._generation = generation

    async def _start_over(self) -> None:
        """Go back to the weights of the head; what was counted since is void."""
        if self.head is None or self._is_lost():
            return  # that is about to happen
        await self._throw_away(self.head)
        await self._worker_group.import_weights(self.head.round)

    async def _throw_away(self, head: Head) -> None:
        """Drop all gradients, in the worker and here. Lost are the samples not merged on the way to `head`."""
        async with self._server.runner.nothing_counts():
            if self._generation == self._worker_group.generation:
                await self._worker_group.take_gradient()
            counted = self._accounting.forget()
        lost = without(counted, without(counted, head.ledger.free))
        if lost:
            self._tell_lost("thrown away", lost)
        self._clear()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let no other task change the worker's weights inside the block, and shield the block from cancellation:
        after a half-done change we would not know the weights."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                yield

    # -- for the modes -----------------------------------------------------------------------------------------------

    def _tell_lost(self, reason: str, ranges: Iterable[Range]) -> None:
        self._events.emit(PipelineLost(samples=count(ranges), reason=reason))

    def _ranges(self, firsts: Iterable[int]) -> tuple[Range, ...]:
        """Return the samples of the micro-batches that begin with these samples."""
        size = self._accounting.micro_batch
        return union((first, first + size) for first in firsts)


def _is_orphaned(head: Head, before: Head | None) -> bool:
    """Return whether the authority has begun `head` on the state of the head `before` with none of its members: all of
    them were restarted, or are gone for good."""
    if before is None or head.term <= before.term or head.state_hash != before.state_hash:
        return False
    return bool(before.members) and not set(before.members).intersection(head.members)
