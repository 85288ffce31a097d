"""A power cut at any moment of rounds and checkpoints leaves a state that was saved, and no older one than the last."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
from tests.swarm.rounds.shadow_disk import ShadowDisk, put_back

ROUNDS = 6
CUTS = 40
NAMES = ("theta", "momentum")
SMALL = FlatLayout.of(ModelConfig(hidden_size=16, layers=1, heads=1, kv_heads=1, intermediate_size=16, max_seq_len=8))


@dataclass(frozen=True)
class Moment:
    """What the disk surely has, what was written, and the last round that a save had told of by then."""

    synced: dict[Path, bytes]
    written: dict[Path, bytes]
    saved: int

    def after_a_cut(self, random: Random) -> dict[Path, bytes]:
        """Return what is there after a cut: all that was synced, and of the rest nothing, all, or a drawn part, of
        files a drawn beginning. What was removed may be there still."""
        share = random.choice((0.0, 0.5, 1.0))
        there = {p: data for p, data in self.synced.items() if p in self.written or random.random() >= share}
        for path, data in self.written.items():
            if path not in there and random.random() < share:
                there[path] = data[: random.randrange(len(data) + 1)]
        return there


class WatchedDisk(ShadowDisk):
    """A home whose disk is looked at after each sync, rename, link and removal."""

    def __init__(self, root: Path, patches: pytest.MonkeyPatch) -> None:
        super().__init__(root, patches)
        self.root, self.moments, self.saved = root.resolve(), list[Moment](), 0
        self._rename = os.rename
        for name in ("rename", "link", "unlink"):
            patches.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: object) -> object:
        def watched(*arguments: object, **options: object) -> None:
            assert callable(call)
            call(*arguments, **options)
            if call is self._rename:
                before, after = map(Path, arguments)  # type: ignore[arg-type]
                for folder in [one for one in self._entries if before in (one, *one.parents)]:
                    self._entries[after / folder.relative_to(before)] = self._entries.pop(folder)
            self._look()

        return watched

    def _note(self, fd: int) -> None:
        super()._note(fd)
        self._look()

    def _look(self) -> None:
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        written = {path.relative_to(self.root): path.read_bytes() for path in paths}
        self.moments.append(Moment(self.files(), written, self.saved))


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
            disk.saved = number
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
        assert (loaded.round if loaded is not None else 0) >= moment.saved, cut
        if loaded is not None:
            assert all(bool((tensor == loaded.round).all()) for tensor in loaded.tensors.values())
