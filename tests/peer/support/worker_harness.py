"""A small worker group for tests: its model, its text, and a log to wait on."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import trio

from peer.checkpoint.inner_state import HEAD_BYTES, NAME
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.errors import WorkerError
from peer.events import Event, EventLog
from peer.footprint.layout import Compute
from peer.ipc.corpus_messages import OwnText
from peer.model.layout import init_flat
from peer.worker.client import WorkerConfig, WorkerGroup, open_worker_group
from peer.worker.commands import WorkerCommands

MODEL = ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48, max_seq_len=32)
INNER = InnerConfig(lr=1e-2, batch_size=4, total_steps=1000, warmup_steps=5, dtype="fp32")
ENDLESS = [(0, 10**9)]
HOUR_S = 3600.0


class Log(EventLog):
    """`wait_for` returns the next event of a name."""

    async def wait_for(self, name: str) -> Event:
        found: list[Event] = []
        arrived = trio.Event()

        def on_event(event: Event) -> None:
            if event.name == name:
                found.append(event)
                arrived.set()

        with self.subscribed(on_event):
            await arrived.wait()
        return found[0]


def freeze(pid: int) -> None:
    """Stop the child process `pid`, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def worker_config(directory: Path, folder: Path, **changes: object) -> WorkerConfig:
    values: dict[str, object] = {
        "model": MODEL,
        "data": DataConfig(source="folder", seq_len=32),
        "text": OwnText(str(folder)),
        "inner": INNER,
        "directory": directory,
        "events": Log(),
        "compute": Compute("cpu", threads=1),
        "silence_s": 10.0,
    }
    return WorkerConfig(**{**values, **changes})  # type: ignore[arg-type]


def saved_state(worker_group: WorkerCommands) -> torch.Tensor:
    """Return the inner optimizer's state as the worker has last saved it, uint8."""
    return torch.frombuffer(bytearray(state_file(worker_group).read_bytes()[HEAD_BYTES:]), dtype=torch.uint8)


def state_file(worker_group: WorkerCommands) -> Path:
    return worker_group.config.private_folder / NAME


@asynccontextmanager
async def open_test_worker_group(
    directory: Path, text: Path, **changes: object
) -> AsyncIterator[tuple[WorkerGroup, Log]]:
    config = worker_config(directory, text, **changes)
    assert isinstance(config.events, Log)
    async with open_worker_group(config) as worker_group:
        init_flat(MODEL, seed=0, out=worker_group.outer) if config.model == MODEL else None
        yield worker_group, config.events


async def hit(worker_group: WorkerGroup, log: Log, penalize: Callable[[int], None], rank: int = 0) -> str:
    """Penalize a worker in the middle of an inner run; the error's text."""
    errors: list[str] = []

    async def compute() -> None:
        with pytest.raises(WorkerError) as caught:
            await worker_group.inner_steps(ENDLESS, 0, HOUR_S)
        errors.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(compute)
        await log.wait_for("inner_step")
        penalize(worker_group.worker_pids[rank])
    return errors[0]
