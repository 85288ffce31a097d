"""`peer` as a free-rider runs it: it takes its full share of a round, trains once, and never again.

    FREE_RIDER=zeros|old|noise|flipped python -m tests.support.free_rider join ...

What it submits afterwards: zeros; the update of its first round; or noise with that update's norm. "flipped" is no
free-rider but a vandal: it trains in every round, and sends its update with the sign flipped.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final
from unittest.mock import patch

import torch

from cli.main import main
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.trainers.worker_trainer import WorkerTrainer

KIND_VARIABLE: Final = "FREE_RIDER"
KINDS: Final = ("zeros", "old", "noise")
FLIPPED: Final = "flipped"
Train = Callable[[WorkerTrainer, TrainRequest], Coroutine[Any, Any, TrainResult]]


def idle_after_one_round(kind: str, train: Train) -> Train:
    """Return a `WorkerTrainer.train` that does without the worker from the second round on."""
    honest: list[TrainResult] = []
    generator = torch.Generator().manual_seed(0)

    async def ride(trainer: WorkerTrainer, request: TrainRequest) -> TrainResult:
        if not honest or honest[0].product.numel() != sum(place.stop - place.start for place in request.places):
            result = await train(trainer, request)
            if result.steps:
                kept = TrainResult(result.steps, result.samples, result.loss, result.product.clone())
                honest[:] = [kept]
            return result
        update = honest[0].product
        if kind == "zeros":
            update = torch.zeros_like(update)
        elif kind == "noise":
            noise = torch.randn(update.shape, generator=generator)
            update = noise * (update.norm() / noise.norm())
        assigned = request.assignment
        samples = min(honest[0].samples, sum(end - first for first, end in assigned.ranges))
        return TrainResult(min(honest[0].steps, assigned.steps), samples, honest[0].loss, update)

    return ride


def flipped(train: Train) -> Train:
    """Return a `WorkerTrainer.train` whose product has the other sign."""

    async def lie(trainer: WorkerTrainer, request: TrainRequest) -> TrainResult:
        result = await train(trainer, request)
        return dataclasses.replace(result, product=-result.product)

    return lie


if __name__ == "__main__":
    kind, honest = os.environ[KIND_VARIABLE], WorkerTrainer.train
    trains = flipped(honest) if kind == FLIPPED else idle_after_one_round(kind, honest)
    with patch.object(WorkerTrainer, "train", trains):
        main()
