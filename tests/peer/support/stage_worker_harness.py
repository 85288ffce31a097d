"""The worker process of one of two stages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from peer.footprint.layout import ONE_DEVICE
from peer.model.layout import init_flat, split_flat
from peer.worker.stage_client import StageWorkerGroup, open_stage_worker_group
from tests.peer.support.stage_harness import INNER, MODEL, SPLITS, spec_of
from tests.peer.support.worker_harness import Log, worker_config

STAGES = SPLITS[2]


def free_slots(worker_group: StageWorkerGroup) -> int:
    return worker_group._free.statistics().current_buffer_used


def is_idle(worker_group: StageWorkerGroup) -> bool:
    """Whether no command awaits a reply and every slot is free."""
    return not worker_group._supervisor._pending and free_slots(worker_group) == worker_group.spec.slots


@asynccontextmanager
async def open_worker(directory: Path, index: int, **changes: object) -> AsyncIterator[tuple[StageWorkerGroup, Log]]:
    """The worker of one of two stages, with the start weights."""
    model = changes.pop("model", MODEL)
    silence_s, ranks = changes.pop("silence_s", 10.0), changes.pop("ranks", ONE_DEVICE)
    spec = spec_of(STAGES, index, **changes)
    folder = directory / str(index)
    config = worker_config(folder, directory, model=model, inner=INNER, stage=spec, silence_s=silence_s, ranks=ranks)
    assert isinstance(config.events, Log)
    async with open_stage_worker_group(config) as worker_group:
        if model == MODEL:
            worker_group.outer.copy_(split_flat(MODEL, init_flat(MODEL, seed=0), STAGES)[index])
            await worker_group.import_weights(epoch=0)
        yield worker_group, config.events
