"""Child of test_checkpoint: saves checkpoint after checkpoint until something kills it.

checkpoint_child.py saves DIRECTORY ROUNDS      one process, rounds 1..ROUNDS
checkpoint_child.py kills DIRECTORY TIMES SEED  forks savers and SIGKILLs each at a random moment; after each kill
                                                a fresh fork loads; prints one JSON line per kill
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import trio

from peer.checkpoint.generation import FileRoom, StateGeneration
from peer.checkpoint.store import CheckpointStore
from peer.config import ModelConfig
from peer.events import EventLog
from peer.identity import Identity
from peer.model.layout import FlatLayout

LAYOUT = FlatLayout.of(
    ModelConfig(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=256, max_seq_len=64)
)
RUN_ID = "run"
IDENTITY = Identity(b"checkpoint child".ljust(32, b"."))


def state(round_number: int) -> dict[str, torch.Tensor]:
    """Values that tell the round, so that a mixture of two rounds shows."""
    return {name: torch.full((LAYOUT.numel,), float(round_number)) for name in ("theta", "momentum")}


def written(room: FileRoom, round_number: int) -> StateGeneration:
    """Return the state of a round: of an odd one in memory, else in files."""
    if round_number % 2:
        return StateGeneration(state(round_number))
    generation = room.new()
    for vector, tensor in state(round_number).items():
        generation.tensors[vector].copy_(tensor)
    return generation


def store_in(directory: Path, events: EventLog) -> CheckpointStore:
    return CheckpointStore(directory, IDENTITY, RUN_ID, events)


def save_rounds(directory: Path, first: int, last: int, started: int | None = None) -> None:
    torch.set_num_threads(1)
    store = store_in(directory, EventLog())
    room = FileRoom(("theta", "momentum"), LAYOUT, directory / "states")

    async def run() -> None:
        for round_number in range(first, last + 1):
            await store.save(round_number, b"head", written(room, round_number), LAYOUT)
            if started is not None:
                os.write(started, b".")

    store.prepare()
    trio.run(run)


def load_report(directory: Path) -> dict[str, object]:
    events = EventLog()
    skipped: list[str] = []
    with events.subscribed(lambda event: skipped.append(event.name)):
        store = store_in(directory, events)
        loaded = store.load_latest()
    orphans = len(list(directory.glob(".tmp-*")))
    store.prepare()
    assert loaded is not None
    whole = all(bool((flat == loaded.round).all()) for flat in loaded.tensors.values())
    return {"round": loaded.round, "whole": whole, "skipped": skipped, "orphans": orphans}


def forked(work: object, *arguments: object) -> int:
    """Run `work` in a fork: this parent has started no thread, so forking it is safe."""
    pid = os.fork()
    if pid == 0:
        assert callable(work)
        work(*arguments)
        os._exit(0)
    return pid


def kill_savers(directory: Path, times: int, seed: int) -> None:
    dice = random.Random(seed)
    first = 1
    for _ in range(times):
        reader, writer = os.pipe()
        pid = forked(save_rounds, directory, first, first + 10_000, writer)
        os.close(writer)
        os.read(reader, 1)  # at least one save is complete
        time.sleep(dice.uniform(0.0, 0.08))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        out, into = os.pipe()
        pid = forked(lambda fd: os.write(fd, json.dumps(load_report(directory)).encode()), into)
        os.close(into)
        answer = os.read(out, 1 << 16)
        os.close(out)
        os.waitpid(pid, 0)
        sys.stdout.write(answer.decode() + "\n")
        first = json.loads(answer)["round"] + 1


if __name__ == "__main__":
    if sys.argv[1] == "saves":
        save_rounds(Path(sys.argv[2]), 1, int(sys.argv[3]))
    else:
        kill_savers(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
