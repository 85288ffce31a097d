"""A power cut at any moment of rounds and checkpoints leaves a state that was saved, and no older one than the last."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from peer.checkpoint.generation import FileRoom, MemoryRoom, StateGeneration, StateRoom
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.store import CheckpointStore
from peer.config import ModelConfig
from peer.events import EventLog
from peer.model.layout import FlatLayout
from tests.peer.support.checkpoint_child import IDENTITY, RUN_ID
from tests.support.disk.shadow_disk import WatchedDisk, put_back

ROUNDS = 6
CUTS = 40
NAMES = ("theta", "momentum")
SMALL = FlatLayout.of(ModelConfig(hidden_size=16, layers=1, heads=1, kv_heads=1, intermediate_size=16, max_seq_len=8))


def write(state: StateGeneration, number: int) -> None:
    for tensor in state.tensors.values():
        tensor.fill_(float(number))
    state.finish(hash_state(list(state.tensors.values())))


@pytest.mark.parametrize("in_files", [True, False])
async def test_a_power_cut_leaves_the_last_saved_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_files: bool
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with monkeypatch.context() as patches:
        disk = WatchedDisk(home, patches)
        room: StateRoom = FileRoom(NAMES, SMALL, home / "states") if in_files else MemoryRoom(NAMES, SMALL.numel)
        store = CheckpointStore(home / "checkpoints", IDENTITY, RUN_ID, EventLog())
        store.prepare()
        state = room.new()
        for number in range(1, ROUNDS + 1):
            following = room.new()  # is written while the one before is saved
            write(state, number)
            assert await store.save(number, b"head", state, SMALL)
            disk.told = number
            state = following
    assert len(disk.moments) > 8 * ROUNDS
    random = Random(f"power {in_files}")
    for cut, moment in enumerate(random.choices(disk.moments, k=CUTS)):
        again = tmp_path / f"again {cut}"
        again.mkdir()
        put_back(moment.after_a_cut(random), again)
        if in_files:
            FileRoom(NAMES, SMALL, again / "states")
        store = CheckpointStore(again / "checkpoints", IDENTITY, RUN_ID, EventLog())
        store.prepare()
        loaded = store.load_latest()
        assert (loaded.round if loaded is not None else 0) >= moment.told, cut
        if loaded is not None:
            assert all(bool((tensor == loaded.round).all()) for tensor in loaded.tensors.values())
