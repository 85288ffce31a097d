"""A peer that takes a stage without replicas begins with the best backup that is proved. It asks while a backup holder
may still come."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from peer.checkpoint.checkpoint_file import LoadedCheckpoint
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import open_host
from swarm.membership.member_record import MemberRecord
from swarm.placement.commits import save_commit
from swarm.placement.stages import open_store
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import HeadReport
from swarm.run.manifest import Manifest
from swarm.run.peer_context import PeerContext
from swarm.state.server import serve_snapshots
from swarm.training import restore as module
from swarm.training.checkpoints import LocalCheckpoint, proof_of
from swarm.training.restore import restore
from swarm.training.stage_backup import BackupHead, StageBackup
from tests.swarm.support.stage_commits import STAGE, Commit, commit_of, context_of, record_of, serve_head_report
from tests.swarm.training.test_roles import run_of


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not end the waits: without an answer of the authority nothing would be waited for."""
    monkeypatch.setattr(module, "AUTHORITY_S", 60.0)
    monkeypatch.setattr(module, "HELD_S", 60.0)
    monkeypatch.setattr(module, "ASK_FOR_S", 120.0)


class Scene:
    """A fresh machine that takes the stage, the authority that stands at a head of it, and backup holders."""

    def __init__(self, folder: Path, manifest: Manifest, fresh: PeerContext, events: list[Event]) -> None:
        self.manifest, self.fresh = manifest, fresh
        self.records: dict[str, MemberRecord] = {}
        self._folder, self._events = folder, events
        self._count = 0

    @asynccontextmanager
    async def machine(self) -> AsyncIterator[PeerContext]:
        """One of the stage before, which does not serve its backup yet."""
        self._count += 1
        async with context_of(self.manifest, self._folder / f"holder{self._count}") as (context, _):
            await self.fresh.host.connect_address(context.host.addresses[0], timeout_s=60)
            yield context

    def enters(self, context: PeerContext) -> None:
        """Its record is read."""
        head = self.manifest.first_head(STAGE - 1)
        self.records[context.host.peer_id] = record_of(context.host, head, STAGE - 1)

    async def opens(self, context: PeerContext, commit: Commit) -> None:
        """It holds that commit, and serves it."""
        assert await save_commit(context, STAGE, *commit)
        serve_snapshots(context.host.rpc, [StageBackup(context, STAGE - 1, dict).snapshots])

    async def begins_with(self) -> Head:
        """The head that a replica would begin with now."""
        return (await LocalCheckpoint.open(self.fresh, STAGE)).head

    @property
    def restored(self) -> list[int]:
        """The rounds of the commits that were fetched."""
        return [int(str(event.fields["round"])) for event in self._events if event.name == "stage_restored"]


@asynccontextmanager
async def scene_of(
    folder: Path, commits: Sequence[int], stands_at: int, term: int = 1
) -> AsyncIterator[tuple[Scene, list[Commit]]]:
    """With commits of these rounds in term 1, and the authority at that round."""
    me = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=me.peer_id)
    last, _ = commit_of(manifest, me, stands_at, term=term)
    async with (
        open_host(identity=me, events=EventLog()) as host,
        context_of(manifest, folder / "fresh") as (fresh, events),
    ):
        report = HeadReport(last.head, Member(me.peer_id, "coordinator"), "coordinating", last.links)
        serve_head_report(host, report)
        await fresh.host.connect_address(host.addresses[0], timeout_s=60)
        with trio.fail_after(120):
            scene = Scene(folder, manifest, fresh, events)
            yield scene, [commit_of(manifest, me, round) for round in commits]


@pytest.mark.parametrize(("stands_at", "term", "best"), [(9, 1, 8), (8, 1, 8), (5, 1, 8), (7, 2, 7), (9, 2, 8)])
async def test_the_best_backup_is_taken(tmp_path: Path, stands_at: int, term: int, best: int) -> None:
    """The highest one, also above the authority, unless the authority has gone back to the state of another one."""
    async with (
        scene_of(tmp_path, (5, 7, 8), stands_at, term) as (scene, commits),
        scene.machine() as one,
        scene.machine() as two,
        scene.machine() as three,
    ):
        for holder, commit in zip((one, two, three), commits, strict=True):
            scene.enters(holder)
            await scene.opens(holder, commit)
        await restore(scene.fresh, STAGE, lambda: scene.records)
        assert scene.restored == [best]
        assert await scene.begins_with() == {5: commits[0], 7: commits[1], 8: commits[2]}[best][0].head


async def test_a_late_backup_holder_is_asked(tmp_path: Path) -> None:
    async with (
        scene_of(tmp_path, (5, 7), stands_at=9) as (scene, (old, new)),
        scene.machine() as one,
        scene.machine() as two,
    ):
        looked = 0

        def known() -> dict[str, MemberRecord]:
            nonlocal looked
            looked += 1
            if looked == 5:  # no peer was there in the first passes
                scene.enters(one)
                scene.enters(two)
            return scene.records

        await scene.opens(one, old)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restore, scene.fresh, STAGE, known)
            while not scene.restored:
                await trio.sleep(0.01)
            assert scene.restored == [5], "what there was at first"
            await scene.opens(two, new)
        assert scene.restored == [5, 7]
        assert await scene.begins_with() == new[0].head


async def test_a_peer_without_a_commit_waits_for_an_answer(tmp_path: Path) -> None:
    async with scene_of(tmp_path, (5,), stands_at=9) as (scene, (saved,)), scene.machine() as holder:
        await scene.opens(holder, saved)
        looked = 0

        def known() -> dict[str, MemberRecord]:
            nonlocal looked
            looked += 1
            if looked == 7:  # cut off from all peers at first
                scene.enters(holder)
            return scene.records

        await restore(scene.fresh, STAGE, known)
        assert scene.restored == [5] and await scene.begins_with() == saved[0].head


async def test_a_peer_with_the_last_commit_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_FOR_S", math.inf)
    async with scene_of(tmp_path, (5, 9), stands_at=9) as (scene, (_, last)), scene.machine() as silent:
        scene.enters(silent)
        assert await save_commit(scene.fresh, STAGE, *last)
        await restore(scene.fresh, STAGE, lambda: scene.records)
        assert scene.restored == [] and await scene.begins_with() == last[0].head


async def test_an_own_commit_without_a_proof_is_replaced(tmp_path: Path) -> None:
    async with scene_of(tmp_path, (5, 8), stands_at=9) as (scene, (saved, own)), scene.machine() as holder:
        assert await save_commit(scene.fresh, STAGE, *own)
        scene.fresh.home.stage(STAGE, 3).proof.unlink()
        scene.enters(holder)
        await scene.opens(holder, saved)
        await restore(scene.fresh, STAGE, lambda: scene.records)
        assert scene.restored == [5] and await scene.begins_with() == saved[0].head


async def test_restoring_gives_up_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_FOR_S", 1.5)
    async with scene_of(tmp_path, (8,), stands_at=9) as (scene, (own,)), scene.machine() as silent:
        assert await save_commit(scene.fresh, STAGE, *own)
        scene.enters(silent)
        await restore(scene.fresh, STAGE, lambda: scene.records)
        assert scene.restored == [] and await scene.begins_with() == own[0].head


async def test_a_backup_that_cannot_be_fetched_is_passed_over(tmp_path: Path) -> None:
    async with (
        scene_of(tmp_path, (5, 9), stands_at=9) as (scene, (saved, last)),
        scene.machine() as one,
        scene.machine() as two,
    ):
        scene.enters(one)
        scene.enters(two)
        await scene.opens(one, saved)
        assert await save_commit(two, STAGE, *last)
        StageBackup(two, STAGE - 1, dict)  # it answers, but serves no snapshot
        await restore(scene.fresh, STAGE, lambda: scene.records)
        assert scene.restored == [5] and await scene.begins_with() == saved[0].head


# -- without the authority --------------------------------------------------------------------------------------------


async def test_without_the_authority_the_newest_backup_is_taken(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    proven, state = commit_of(manifest, authority, 7)
    head = proven.head
    async with (
        context_of(manifest, tmp_path / "a") as (holder, _),
        context_of(manifest, tmp_path / "b") as (fresh, seen),
    ):
        assert await save_commit(holder, STAGE, proven, state)
        backup = StageBackup(holder, STAGE - 1, dict)
        assert backup.of == STAGE
        serve_snapshots(holder.host.rpc, [backup.snapshots])
        await fresh.host.connect_address(holder.host.addresses[0], timeout_s=60)
        records = {holder.host.peer_id: record_of(holder.host, head, STAGE - 1)}

        await restore(fresh, STAGE, lambda: records)
        saved = await LocalCheckpoint.open(fresh, STAGE)
        assert saved.head == head and saved.state.tree.root == head.state_hash
        assert proof_of(fresh, STAGE, head) == proven.links
        assert [event.name for event in seen].count("stage_restored") == 1

        await restore(fresh, STAGE, lambda: records)
        assert [event.name for event in seen].count("stage_restored") == 1, "it is on its own disk by now"


async def test_a_backup_that_the_authority_has_not_signed_for_is_refused(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(run_of(3), authority=Identity.generate().peer_id)
    forged, state = commit_of(manifest, Identity.generate(), 7)
    async with (
        context_of(manifest, tmp_path / "a") as (holder, _),
        context_of(manifest, tmp_path / "b") as (fresh, seen),
    ):
        assert await save_commit(holder, STAGE, forged, state)
        backup = StageBackup(holder, STAGE - 1, dict)
        backup._held = backup._publish(commit_on_disk(holder))
        assert backup._held == BackupHead(), "an honest holder does not offer it"
        backup._held = BackupHead(forged.head, forged.links)
        serve_snapshots(holder.host.rpc, [backup.snapshots])
        await fresh.host.connect_address(holder.host.addresses[0], timeout_s=60)
        records = {holder.host.peer_id: record_of(holder.host, forged.head, STAGE - 1)}
        await restore(fresh, STAGE, lambda: records)
        assert open_store(fresh.home, manifest, STAGE, fresh.host.identity, EventLog()).load_latest() is None
        assert {event.fields["peer"] for event in seen if event.name == "peer_penalized"} == {holder.host.peer_id}


def commit_on_disk(context: PeerContext) -> LoadedCheckpoint:
    loaded = open_store(context.home, context.manifest, STAGE, context.host.identity, EventLog()).load_latest()
    assert loaded is not None
    return loaded


async def test_a_stage_with_replicas_is_not_restored(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    proven, state = commit_of(manifest, authority, 7)
    head = proven.head
    async with context_of(manifest, tmp_path / "a") as (holder, _), context_of(manifest, tmp_path / "b") as (fresh, _b):
        assert await save_commit(holder, STAGE, proven, state)
        serve_snapshots(holder.host.rpc, [StageBackup(holder, STAGE - 1, dict).snapshots])
        await fresh.host.connect_address(holder.host.addresses[0], timeout_s=60)
        records = {
            holder.host.peer_id: record_of(holder.host, head, STAGE - 1),
            "a replica": record_of(holder.host, head, STAGE),
        }
        await restore(fresh, STAGE, lambda: records)
        assert open_store(fresh.home, manifest, STAGE, fresh.host.identity, EventLog()).load_latest() is None
