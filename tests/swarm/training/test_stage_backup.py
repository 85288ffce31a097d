"""A stage's commit outlives its replicas: a replica of the stage before holds a backup and serves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.identity import Identity
from swarm.membership.proven_heads import ProvenHead
from swarm.placement.commits import fetch_commit, save_commit
from swarm.protocol.agreement.records import LinkRecord
from swarm.protocol.head import Member
from swarm.protocol.messages import HeadReport
from swarm.rounds.records import RecordFiles
from swarm.state.fetch import Fetched
from swarm.state.server import serve_snapshots
from swarm.training import stage_backup as backup
from swarm.training.checkpoints import note_stage, proof_of, saved_stages
from swarm.training.stage_backup import (
    HELD_BACKUP,
    AskBackup,
    BackupHead,
    StageBackup,
    newest_seen,
)
from tests.swarm.support.stage_commits import STAGE, begun, commit_of, context_of, record_of, serve_head_report, started
from tests.swarm.training.test_roles import run_of


async def test_a_backup_holder_serves_its_backup(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    proven, state = commit_of(manifest, authority, 7)
    async with context_of(manifest, tmp_path / "a") as (holder, _), context_of(manifest, tmp_path / "b") as (other, _b):
        backup = StageBackup(holder, STAGE - 1, dict)
        serve_snapshots(holder.host.rpc, [backup.snapshots])
        peer = holder.host.peer_id
        await other.host.connect_address(holder.host.addresses[0], timeout_s=30)
        assert backup.of == STAGE
        assert await save_commit(holder, STAGE, proven, state)

        async def ask(stage: int) -> BackupHead:
            return (await other.host.rpc.call(peer, HELD_BACKUP, AskBackup(stage), timeout_s=30)).body

        assert await ask(STAGE) == BackupHead(proven.head, proven.links)
        assert await ask(STAGE + 1) == BackupHead(), "of the next stage only"
        fetched = await fetch_commit(other, STAGE, replace(proven, holders=(peer,)))
        assert hash_state(fetched.tensors).root == proven.head.state_hash


async def test_a_peer_prefers_its_own_stage_to_its_backups(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    async with context_of(manifest, tmp_path / "home") as (context, _):
        for stage in (STAGE - 1, STAGE):  # the backup was written last
            assert await save_commit(context, stage, *commit_of(manifest, authority, 7, stage))
        assert saved_stages(context)[0] == STAGE
        note_stage(context, STAGE - 1)
        assert saved_stages(context) == [STAGE - 1, STAGE]


async def test_a_forged_head_is_not_backed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority's signatures are public; what they do not lead to counts for nothing, and its teller is named."""
    monkeypatch.setattr(backup, "ASK_S", 60.0)
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    async with (
        context_of(manifest, tmp_path / "home") as (context, seen),
        context_of(manifest, tmp_path / "replica") as (replica, _),
        context_of(manifest, tmp_path / "liar") as (liar, _b),
    ):
        honest, false = (Member(other.host.peer_id, "s") for other in (replica, liar))
        first = begun(manifest.first_head(STAGE), honest)
        proof = started(authority, first).links
        forged = msgspec.structs.replace(first, round=1 << 40, state_hash=b"lie!" * 8, members=(false,))
        signed = started(Identity.generate(), forged).links
        records = {}
        for other, report in (
            (replica, HeadReport(first, honest, "training", proof)),
            (liar, HeadReport(forged, false, "training", (*proof, *signed))),
        ):
            serve_head_report(other.host, report)
            await context.host.connect_address(other.host.addresses[0], timeout_s=60)
            records[other.host.peer_id] = record_of(other.host, report.head, STAGE)
        found = await newest_seen(context, STAGE, records)
        assert found is not None and found.head == first and found.holders == (honest.peer,)
        assert [event.fields["peer"] for event in seen if event.name == "peer_penalized"] == [false.peer]


async def test_a_newcomer_with_the_first_state_replaces_no_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas are gone, and one that takes their stage shows the head of its beginning: also to a backup holder
    that was started again meanwhile. What the stage goes on from in another term is backed up."""
    monkeypatch.setattr(backup, "FIRST_S", 0.0)
    monkeypatch.setattr(backup, "EVERY_S", 0.01)
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    kept, state = commit_of(manifest, authority, 7)
    early, early_state = commit_of(manifest, authority, 0)
    back, back_state = commit_of(manifest, authority, 5, term=2)
    shown, states = [early], {early.head.hash: early_state, back.head.hash: back_state}
    looked = [0]

    async def seen(*_: object) -> ProvenHead:
        looked[0] += 1
        return shown[0]

    async def fetched(context: object, stage: int, proven: ProvenHead) -> Fetched:
        return states[proven.head.hash]

    monkeypatch.setattr(backup, "newest_seen", seen)
    monkeypatch.setattr(backup, "fetch_commit", fetched)
    async with context_of(manifest, tmp_path / "home") as (context, events):
        assert await save_commit(context, STAGE, kept, state)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(StageBackup(context, STAGE - 1, dict).run)
            with trio.fail_after(300):
                while looked[0] < 3:
                    await trio.sleep(0.01)
                assert [event.fields["round"] for event in events if event.name == "backup_saved"] == []
                shown[0] = back
                while not [event for event in events if event.name == "backup_saved"]:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        (saved,) = [event for event in events if event.name == "backup_saved"]
        assert saved.fields["round"] == 5


async def test_a_replica_proves_its_commit_from_its_own_records(tmp_path: Path) -> None:
    """Where a backup holder was a replica of that stage before."""
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    proven, state = commit_of(manifest, authority, 7)
    async with context_of(manifest, tmp_path / "home") as (context, _):
        assert await save_commit(context, STAGE, replace(proven, links=()), state)
        assert proof_of(context, STAGE, proven.head) is None
        record = msgspec.msgpack.encode(LinkRecord(3, proven.links[0], True))
        RecordFiles(context.home.stage(STAGE, 3).agreement).write({"link/3": record})
        assert proof_of(context, STAGE, proven.head) == proven.links
        assert proof_of(context, STAGE, manifest.first_head(STAGE)) == ()
