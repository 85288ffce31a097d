"""The trainer of an ordinary peer: inner steps in its compute worker (`peer.gang`)."""

from __future__ import annotations

from typing import Final

import torch

from optim.recipes.interface import Recipe, Turn
from peer.errors import WorkerError
from peer.events import EventLog
from peer.gang import Gang
from swarm.plan import Assignment
from swarm.trainer import Work

SPEED_MEMORY: Final = 0.7  # of the smoothed speed; volunteers' machines have other things to do at times
VALIDATION_BATCHES: Final = 8


class GangTrainer:
    """Implements `swarm.trainer.Trainer`. Where `validate_round` is set, the held-out loss of the current outer weights
    is measured before the next inner steps (event `val_evaluated`)."""

    def __init__(self, gang: Gang, recipe: Recipe, events: EventLog) -> None:
        self.speed = 0.0
        self.validate_round: int | None = None
        self.val_loss: float | None = None
        self.loss: float | None = None
        self._gang = gang
        self._recipe = recipe
        self._events = events

    async def train(self, assignment: Assignment, turn: Turn, deadline_s: float) -> Work:
        await self.validate()
        result = await self._gang.inner_steps(list(assignment.ranges), turn.step, deadline_s, assignment.steps)
        if result.steps and result.seconds > 0:
            speed = result.steps / result.seconds
            self.speed = SPEED_MEMORY * self.speed + (1 - SPEED_MEMORY) * speed if self.speed else speed
            self.loss = result.loss
        return Work(result.steps, result.sequences, result.loss, self._gang.delta)

    async def validate(self) -> None:
        """Measure the held-out loss if it is asked for; a worker that fails at it costs nothing but the number."""
        round_number, self.validate_round = self.validate_round, None
        if round_number is None:
            return
        try:
            self.val_loss = await self._gang.evaluate(VALIDATION_BATCHES)
        except WorkerError as error:
            self._events.emit("worker_failed", round=round_number, reason=str(error))
            return
        self._events.emit("val_evaluated", round=round_number, loss=self.val_loss)

    def wrap_up(self) -> None:
        self._gang.stop_inner()

    def adopt(self, theta: torch.Tensor) -> None:
        self._gang.outer.copy_(theta)
