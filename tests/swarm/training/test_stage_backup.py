"""A stage's commit outlives its replicas: a replica of the stage before holds a backup and serves it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from peer.checkpoint.hash_tree import hash_state
from peer.identity import Identity, sign_body
from swarm.protocol.head import Member
from swarm.protocol.messages import REGROUP_KIND, HeadReport
from swarm.state.server import serve_snapshots
from swarm.training import stage_backup as backup
from swarm.training.checkpoints import note_stage, saved_stages
from swarm.training.stage_backup import (
    HELD_BACKUP,
    AskBackup,
    BackupHead,
    StageBackup,
    fetch_commit,
    newest_seen,
    save_backup,
)
from tests.swarm.support.stage_commits import STAGE, commit_of, context_of
from tests.swarm.training.test_roles import run_of


async def test_a_backup_holder_serves_its_backup(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    head, regroup, state = commit_of(manifest, authority, 7)
    async with context_of(manifest, tmp_path / "a") as (holder, _), context_of(manifest, tmp_path / "b") as (other, _b):
        backup = StageBackup(holder, STAGE - 1, dict)
        serve_snapshots(holder.host.rpc, [backup.snapshots])
        peer = holder.host.peer_id
        await other.host.connect_address(holder.host.addresses[0], timeout_s=30)
        assert backup.of == STAGE
        assert await save_backup(holder, STAGE, head, regroup, state)

        async def ask(stage: int) -> BackupHead:
            return (await other.host.rpc.call(peer, HELD_BACKUP, AskBackup(stage), timeout_s=30)).body

        assert await ask(STAGE) == BackupHead(head, regroup)
        assert await ask(STAGE + 1) == BackupHead(), "of the next stage only"
        fetched = await fetch_commit(other, STAGE, head, (peer,))
        assert hash_state(fetched.tensors).root == head.state_hash


async def test_a_peer_prefers_its_own_stage_to_its_backups(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    async with context_of(manifest, tmp_path / "home") as (context, _):
        for stage in (STAGE - 1, STAGE):  # the backup was written last
            head, regroup, state = commit_of(manifest, authority, 7, stage)
            assert await save_backup(context, stage, head, regroup, state)
        assert saved_stages(context)[0] == STAGE
        note_stage(context, STAGE - 1)
        assert saved_stages(context) == [STAGE - 1, STAGE]


async def test_a_forged_head_is_not_backed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority's signature is public; only reports of the members of its term count."""
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    first = manifest.first_head(STAGE)
    replica, liar = Member(Identity.generate().peer_id, "s"), Member(Identity.generate().peer_id, "s")
    begun = first.regrouped((replica,), 1)
    signed = sign_body(authority, REGROUP_KIND, begun)
    committed = msgspec.structs.replace(begun, round=7, previous=begun.hash)
    forged = msgspec.structs.replace(committed, round=1 << 40, state_hash=b"lie!" * 8, members=(liar,))

    async def ask_head_reports(*args: object, **more: object) -> list[tuple[str, HeadReport]]:
        said = ((committed, replica), (forged, liar))
        return [(member.peer, HeadReport(head, member, "compute", signed)) for head, member in said]

    monkeypatch.setattr(backup, "ask_head_reports", ask_head_reports)
    async with context_of(manifest, tmp_path / "home") as (context, _):
        found = await newest_seen(context, STAGE, {})
    assert found is not None and found[0] == committed
