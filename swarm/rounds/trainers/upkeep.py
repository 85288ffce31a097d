"""Upkeep of a replica beside its rounds: it measures the held-out loss and saves checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from peer.catalogue.rounds import RunFinished
from peer.events import EventLog
from peer.footprint.kept import CHECKPOINT_S
from swarm.protocol.head import Head
from swarm.rounds.trainers.trained_rounds import TrainedRounds
from swarm.rounds.trainers.trainer import Trainer


class ReplicaTrainer(Trainer, Protocol):
    """A trainer of one replica for as long as the replica is open."""

    trained: TrainedRounds
    """The outcomes of this peer's own steps."""
    val_loss: float | None
    """Held-out loss, nats a byte."""
    val_round: int
    """The round of `val_loss`; -1 before the first measurement."""
    validate_round: int | None
    """The round whose held-out loss is to be measured, when it suits the trainer."""

    async def run(self) -> None: ...

    async def validate(self) -> None:
        """Measure the held-out loss of `validate_round` now."""


class ReplicaUpkeep:
    """Measurements and checkpoints of one replica. One peer of a group measures for all of it."""

    def __init__(self, trainer: ReplicaTrainer, save: Callable[[Head], Awaitable[object]], events: EventLog) -> None:
        self.finished = False
        self._trainer, self._save, self._events = trainer, save, events
        self._saved_at = trio.current_time()
        self._tasks: trio.Nursery | None = None

    @asynccontextmanager
    async def open(self, head: Callable[[], Head]) -> AsyncIterator[trio.Nursery]:
        """Yield a nursery for the replica's tasks; at the end they are cancelled and `head()` is saved, also when the
        block is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                yield nursery
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._save(head())

    def committed(self, head: Head, measures: bool) -> None:
        """Request the work that is due once the replica is at `head`; `measures`: whether this peer measures."""
        self._trainer.validate_round = head.round if measures else None
        now = trio.current_time()
        if now - self._saved_at >= CHECKPOINT_S and self._tasks is not None:
            self._saved_at = now
            self._tasks.start_soon(self._save, head)

    async def finish(self, head: Head, measures: bool) -> None:
        """Make the run's last measurement, and report that the run is finished on this peer."""
        if measures:
            self._trainer.validate_round = head.round
            await self._trainer.validate()
        self.finished = True
        self._events.emit(RunFinished(round=head.round, state_hash=head.state_hash.hex()))
