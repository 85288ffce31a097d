"""Checkpoints come back bit for bit, and an intact one survives every failure of disk or process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import msgspec
import pytest
import torch
import trio
import trio.testing
from safetensors.torch import load_file

from peer.checkpoint.checkpoint_file import load_checkpoint
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.store import CheckpointStore
from peer.config import ModelConfig
from peer.errors import CheckpointError, ResourceError
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.model.layout import FlatLayout
from tests.peer.support.checkpoint_child import IDENTITY, RUN_ID
from tests.support.forking.forked import ForkedProcess

CONFIG = ModelConfig(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_seq_len=64)
LAYOUT = FlatLayout.of(CONFIG)
REPO = Path(__file__).parents[3]
CHILD = "tests.peer.support.checkpoint_child"


def some_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(LAYOUT.numel, generator=generator) for name in ("theta", "momentum")}


class Shop:
    """A store, and the events it emitted."""

    def __init__(self, directory: Path, run_id: str = RUN_ID, keep_last: int = 2, keep_every: int = 0) -> None:
        self.seen: list[Event] = []
        self.events = EventLog()
        self.directory = directory
        self.identity = IDENTITY
        self.store = CheckpointStore(directory, self.identity, run_id, self.events, keep_last, keep_every)

    async def save(self, round_number: int) -> bool:
        with self.events.subscribed(self.seen.append):
            return await self.store.save(round_number, b"head", StateGeneration(some_state(round_number)), LAYOUT)

    def load_round(self) -> int | None:
        with self.events.subscribed(self.seen.append):
            loaded = self.store.load_latest()
        if loaded is not None:
            assert torch.equal(loaded.theta, some_state(loaded.round)["theta"])
            assert torch.equal(loaded.tensors["momentum"], some_state(loaded.round)["momentum"])
        return None if loaded is None else loaded.round

    def reasons(self, name: str) -> list[str]:
        return [str(event.fields["reason"]) for event in self.seen if event.name == name]

    @property
    def newest(self) -> Path:
        return self.store.list()[-1].path


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path / "checkpoints")
    shop.store.prepare()
    return shop


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path, "size=2m") as disk:
        yield disk


@contextmanager
def mounted(tmp_path: Path, options: str) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this test mounts a tmpfs, which needs root: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


async def test_a_checkpoint_comes_back_bit_for_bit(shop: Shop) -> None:
    state = some_state(7)
    assert await shop.store.save(7, b"opaque head", StateGeneration(state), LAYOUT)
    loaded = shop.store.load_latest()
    assert loaded is not None
    assert (loaded.round, loaded.head, loaded.layout) == (7, b"opaque head", LAYOUT)
    assert loaded.tree.root == hash_state([state["theta"], state["momentum"]]).root
    assert torch.equal(loaded.theta, state["theta"]) and torch.equal(loaded.tensors["momentum"], state["momentum"])
    assert loaded.signer == shop.identity.peer_id


async def test_the_files_are_ordinary_safetensors_with_canonical_names(shop: Shop) -> None:
    await shop.save(1)
    files = sorted(path.name for path in shop.newest.glob("*.safetensors"))
    assert files == ["model-00001-of-00001.safetensors", "momentum-00001-of-00001.safetensors"]
    parameters = load_file(shop.newest / files[0])
    assert set(parameters) == set(LAYOUT.slots)
    expected = LAYOUT.views(some_state(1)["theta"])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parameters.items())


async def test_a_state_that_is_not_the_hashed_one_is_not_saved(shop: Shop) -> None:
    state = some_state(1)
    held = StateGeneration(state, hash_state(list(state.values())))
    state["momentum"][17] += 1.0
    with shop.events.subscribed(shop.seen.append):
        assert not await shop.store.save(1, b"head", held, LAYOUT)
    assert "not the one that was hashed" in shop.reasons("checkpoint_failed")[0]
    assert not shop.store.list() and not list(shop.directory.glob(".tmp-*"))


async def test_a_file_holds_the_flat_vector_from_a_page_on(shop: Shop) -> None:
    await shop.save(1)
    data = (shop.newest / "model-00001-of-00001.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    assert begin % 4096 == 0
    assert torch.equal(torch.frombuffer(bytearray(data[begin:]), dtype=torch.float32), some_state(1)["theta"])


async def test_a_save_during_a_save_is_postponed(shop: Shop) -> None:
    outcomes: list[bool] = []

    async def save(round_number: int) -> None:
        outcomes.append(await shop.store.save(round_number, b"", StateGeneration(some_state(round_number)), LAYOUT))

    with shop.events.subscribed(shop.seen.append):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(save, 1)
            nursery.start_soon(save, 2)
    assert outcomes == [False, True]
    assert len(shop.reasons("checkpoint_postponed")) == 1 and len(shop.store.list()) == 1


async def test_the_last_two_and_every_fourth_are_kept(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "c", keep_last=2, keep_every=4)
    shop.store.prepare()
    for round_number in range(1, 11):
        assert await shop.save(round_number)
    assert [entry.round for entry in shop.store.list()] == [4, 8, 9, 10]


async def test_the_newest_save_is_loaded(shop: Shop) -> None:
    """After a regroup a peer may continue from an earlier round."""
    for round_number in (5, 6, 4):
        await shop.save(round_number)
    assert shop.load_round() == 4


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 4]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, garbage, os.unlink])
@pytest.mark.parametrize("pattern", ["model-*", "momentum-*", "manifest.msgpack"])
async def test_a_damaged_checkpoint_is_skipped(shop: Shop, damage: object, pattern: str) -> None:
    await shop.save(1)
    await shop.save(2)
    [file] = shop.newest.glob(pattern)
    assert callable(damage)
    damage(file)
    assert shop.load_round() == 1
    if not (pattern == "manifest.msgpack" and damage is os.unlink):  # without a manifest it does not exist
        assert len(shop.reasons("checkpoint_skipped")) == 1


async def test_a_damaged_checkpoint_does_not_displace_an_intact_one(shop: Shop) -> None:
    await shop.save(1)
    await shop.save(2)
    flip_a_bit(next(shop.newest.glob("model-*")))
    assert shop.load_round() == 1
    await shop.save(3)
    flip_a_bit(next(shop.newest.glob("model-*")))
    assert shop.load_round() == 1


async def test_an_edited_manifest_is_refused(shop: Shop) -> None:
    await shop.save(1)
    path = shop.newest / "manifest.msgpack"
    manifest = msgspec.msgpack.decode(path.read_bytes())
    manifest["body"] = manifest["body"].replace(b"run", b"nur")
    path.write_bytes(msgspec.msgpack.encode(manifest))
    with pytest.raises(CheckpointError, match="signature"):
        load_checkpoint(shop.newest)


async def test_values_that_are_not_finite_are_not_loaded(shop: Shop) -> None:
    await shop.save(1)
    state = some_state(2)
    state["momentum"][17] = float("nan")
    await shop.store.save(2, b"", StateGeneration(state), LAYOUT)
    assert shop.load_round() == 1
    assert "not finite" in shop.reasons("checkpoint_skipped")[0]


async def test_a_checkpoint_of_another_run_is_not_loaded(tmp_path: Path) -> None:
    one = Shop(tmp_path / "c", run_id="one")
    one.store.prepare()
    await one.save(1)
    other = Shop(tmp_path / "c", run_id="other")
    assert other.load_round() is None
    assert "another run" in other.reasons("checkpoint_skipped")[0]


async def test_a_checkpoint_that_another_peer_signed_is_not_loaded(shop: Shop) -> None:
    await shop.save(1)
    shop.store = CheckpointStore(shop.directory, Identity.generate(), RUN_ID, shop.events)
    await shop.save(2)
    shop.store = CheckpointStore(shop.directory, shop.identity, RUN_ID, shop.events)
    assert shop.load_round() == 1
    assert "is signed by" in shop.reasons("checkpoint_skipped")[0]


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert Shop(tmp_path).load_round() is None
    assert Shop(tmp_path / "absent").load_round() is None


async def test_a_full_disk_loses_old_checkpoints_first(small_disk: Path) -> None:
    """2 MiB disk, 0.6 MiB state: two fit beside each other with headroom, a third only without the first."""
    shop = Shop(small_disk / "c", keep_last=10)
    shop.store.prepare()
    for round_number in range(1, 6):
        assert await shop.save(round_number)
    assert shop.load_round() == 5
    assert shop.reasons("checkpoint_deleted") and len(shop.store.list()) < 5


async def test_a_full_disk_skips_the_checkpoint(small_disk: Path) -> None:
    shop = Shop(small_disk / "c")
    shop.store.prepare()
    assert await shop.save(1)
    filler = small_disk / "film.mkv"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 4096))
    assert not await shop.save(2)
    [reason] = shop.reasons("checkpoint_failed")
    assert "full" in reason and "free some space" in reason and "training continues" in reason
    assert shop.load_round() == 1 and not list(small_disk.glob("c/.tmp-*"))
    filler.unlink()
    assert await shop.save(3) and shop.load_round() == 3


async def test_a_disk_that_fills_up_during_the_save_loses_old_checkpoints(tmp_path: Path) -> None:
    """Out of inodes: free space looks ample, but the write fails."""
    with mounted(tmp_path, "size=64m,nr_inodes=14") as disk:
        shop = Shop(disk / "c", keep_last=10)
        shop.store.prepare()
        for round_number in range(1, 6):
            assert await shop.save(round_number)
        assert shop.load_round() == 5
        assert "the disk is full" in shop.reasons("checkpoint_deleted")


async def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=8m") as disk:
        shop = Shop(disk / "c")
        shop.store.prepare()
        assert await shop.save(1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(ResourceError, match=r"cannot be written .*Read-only.*choose a writable --home"):
            shop.store.prepare()
        assert not await shop.save(2)
        assert "cannot be written" in shop.reasons("checkpoint_failed")[0]
        assert shop.load_round() == 1


@pytest.mark.process
def test_sigkill_before_the_manifest_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    done = run_child("saves", tmp_path, 5, fault="kill:during_checkpoint:3")
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".tmp-*"))
    store = CheckpointStore(tmp_path, IDENTITY, RUN_ID, EventLog())
    loaded = store.load_latest()
    assert loaded is not None and loaded.round == 2 and bool((loaded.theta == 2).all())
    store.prepare()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.process
def test_sigkill_at_random_moments_never_tears_a_checkpoint(tmp_path: Path) -> None:
    done = run_child("kills", tmp_path, 20, 1)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert len(reports) == 20
    assert all(report["whole"] and not report["skipped"] for report in reports)
    assert any(report["orphans"] for report in reports), "no kill fell into a save: the test shows nothing"


def run_child(*arguments: object, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "BARNRAISE_FAULT": fault}
    with ForkedProcess(CHILD, *map(str, arguments), env=environment, stdout=PIPE, stderr=PIPE, text=True) as child:
        printed, said = child.communicate(timeout=500)
    return subprocess.CompletedProcess(child.args, child.returncode, printed, said)
