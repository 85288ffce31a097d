"""A state is written once and lasts as long as anything refers to it: in memory, or in files that checkpoints link."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peer.checkpoint.checkpoint_file import load_checkpoint
from peer.checkpoint.generation import FileRoom, MemoryRoom, StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.store import CheckpointStore
from peer.config import ModelConfig
from peer.errors import ResourceError
from peer.events import Event, EventLog
from peer.footprint import kept
from peer.model.layout import FlatLayout
from tests.peer.support.checkpoint_child import IDENTITY, RUN_ID

LAYOUT = FlatLayout.of(
    ModelConfig(hidden_size=64, layers=1, heads=4, kv_heads=2, intermediate_size=128, max_seq_len=64)
)
NAMES = ("theta", "momentum")
MAPS = Path("/proc/self/maps")


def write(state: StateGeneration, seed: int) -> StateGeneration:
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.tensors.values():
        tensor.copy_(torch.randn(LAYOUT.numel, generator=generator))
    state.finish(hash_state(list(state.tensors.values())))
    return state


def memory(folder: Path | None = None) -> MemoryRoom:
    return MemoryRoom(NAMES, LAYOUT.numel, folder)


# -- in files --------------------------------------------------------------------------------------------------------


def test_any_program_can_read_the_files_of_a_state(tmp_path: Path) -> None:
    state = write(FileRoom(NAMES, LAYOUT, tmp_path / "states").new(), 1)
    for vector, file in state.files.items():
        found = load_file(file)
        assert list(found) == list(LAYOUT.slots)
        for name, view in LAYOUT.views(state.tensors[vector]).items():
            assert torch.equal(found[name], view)


def test_the_files_of_a_state_are_gone_with_its_last_reader(tmp_path: Path) -> None:
    room = FileRoom(NAMES, LAYOUT, tmp_path / "states")
    states = [write(room.new(), seed) for seed in range(3)]
    assert len(list((tmp_path / "states").iterdir())) == 3
    del states[1]
    assert len(list((tmp_path / "states").iterdir())) == 2
    assert states[0].tree == hash_state(list(states[0].tensors.values())) != states[1].tree


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "states" / "abc" / "model-00001-of-00001.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    FileRoom(NAMES, LAYOUT, tmp_path / "states")
    assert not list((tmp_path / "states").iterdir())


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write through a map that finds no room ends the process by SIGBUS."""
    room = FileRoom(NAMES, LAYOUT, tmp_path / "states")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for take in (room.new, lambda: room.vector(8)):
        with pytest.raises(ResourceError, match="1 MiB are needed for the next state: free some space"):
            take()
    assert not list((tmp_path / "states").iterdir())


def test_a_system_that_cannot_reserve_room_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS."""
    monkeypatch.delattr("os.posix_fallocate")
    with pytest.raises(ResourceError, match="--state memory"):
        FileRoom(NAMES, LAYOUT, tmp_path / "states").new()


def test_what_a_method_keeps_lies_in_a_file_without_a_name(tmp_path: Path) -> None:
    """A coding error is of the size of the weights."""
    room, before = FileRoom(NAMES, LAYOUT, tmp_path / "states"), MAPS.read_text().count(str(tmp_path))
    kept_vector = room.vector(1 << 20)
    assert not kept_vector.any() and not memory().vector(8).any()
    kept_vector += 1.0
    assert MAPS.read_text().count(f"{tmp_path}/states") == before + 1 and not list((tmp_path / "states").iterdir())
    del kept_vector
    assert MAPS.read_text().count(f"{tmp_path}/states") == before


# -- as checkpoints ----------------------------------------------------------------------------------------------------


class Saved:
    """Checkpoints in a folder, and the events of its store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, events = folder, list[Event](), EventLog()
        events.subscribe(self.seen.append)
        self.store = CheckpointStore(folder, IDENTITY, RUN_ID, events)
        self.store.prepare()

    async def save(self, state: StateGeneration, round_number: int = 1) -> Path:
        assert await self.store.save(round_number, b"head", state, LAYOUT), self.seen
        return self.store.list()[-1].path


async def test_a_checkpoint_is_a_second_name_of_the_files(tmp_path: Path) -> None:
    state = write(FileRoom(NAMES, LAYOUT, tmp_path / "states").new(), 1)
    path = await Saved(tmp_path / "checkpoints").save(state)
    for vector, file in state.files.items():
        assert os.path.samefile(file, path / file.name), vector
    root = state.tree.root
    del state
    loaded = load_checkpoint(path, RUN_ID, IDENTITY.peer_id)
    assert loaded.tree.root == root == hash_state(list(loaded.tensors.values())).root


async def test_a_checkpoint_is_written_where_files_cannot_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on FAT."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    state = write(FileRoom(NAMES, LAYOUT, tmp_path / "states").new(), 1)
    path = await Saved(tmp_path / "checkpoints").save(state)
    assert load_checkpoint(path).tree == state.tree
    assert not any(os.path.samefile(file, path / file.name) for file in state.files.values())


async def test_files_that_cannot_reach_the_disk_are_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("peer.checkpoint.checkpoint_file.fsync_path", broken)
    saved, state = Saved(tmp_path / "checkpoints"), write(FileRoom(NAMES, LAYOUT, tmp_path / "states").new(), 1)
    assert not await saved.store.save(1, b"head", state, LAYOUT) and not saved.store.list()


@pytest.mark.parametrize("in_files", [True, False])
async def test_a_loaded_checkpoint_is_mapped_and_outlives_its_folder(tmp_path: Path, in_files: bool) -> None:
    room = FileRoom(NAMES, LAYOUT, tmp_path / "states") if in_files else memory()
    saved = Saved(tmp_path / "checkpoints")
    path = await saved.save(write(room.new(), 1))
    loaded = load_checkpoint(path)
    assert str(path) in MAPS.read_text()
    for round_number in (2, 3):
        await saved.save(write(room.new(), round_number), round_number)
    assert not path.exists() and hash_state(list(loaded.tensors.values())) == loaded.tree
    loaded.theta[0] = 7.0  # this process's own copy of a page


# -- in memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_used_again_once_nothing_refers_to_the_state() -> None:
    room = memory()
    first, second = room.new(), room.new()
    place, kept_place = first.tensors["theta"].data_ptr(), second.tensors["theta"].data_ptr()
    del first
    third = room.new()
    assert third.tensors["theta"].data_ptr() == place != kept_place


def test_a_third_large_state_lies_in_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SMALL_BYTES", 0)
    room = memory(tmp_path)
    states = [write(room.new(), seed) for seed in range(2)]
    assert f"{tmp_path}/" not in MAPS.read_text()
    third = write(room.new(), 3)
    assert f"{tmp_path}/" in MAPS.read_text() and not list(tmp_path.iterdir()), "a file without a name"
    assert third.tree == hash_state(list(third.tensors.values()))
    del third, states[0]
    again = room.new()
    assert f"{tmp_path}/" not in MAPS.read_text(), "memory that is free comes first"
    del again


def test_a_third_state_is_in_memory_where_the_system_cannot_reserve_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.setattr(kept, "SMALL_BYTES", 0)
    monkeypatch.delattr("os.posix_fallocate")
    room = memory(tmp_path)
    states = [write(room.new(), seed) for seed in range(3)]
    assert f"{tmp_path}/" not in MAPS.read_text() and len({state.tree.root for state in states}) == 3
