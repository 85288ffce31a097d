"""A stage's commit outlives its replicas: kept by a peer of the stage before, which tells of it and hands it out."""

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
from swarm.training.checkpoints import kept_stages, note_replica
from swarm.training.stage_backup import HELD_BACKUP, AskBackup, BackupHead, StageBackup, fetch_commit, keep, newest_seen
from tests.swarm.support.kept_commits import STAGE, commit_of, context_of
from tests.swarm.training.test_roles import run_of


async def test_a_keeper_tells_what_it_keeps_and_hands_it_out(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    head, regroup, state = commit_of(manifest, authority, 7)
    async with context_of(manifest, tmp_path / "a") as (keeper, _), context_of(manifest, tmp_path / "b") as (other, _b):
        backup = StageBackup(keeper, STAGE - 1, dict)
        serve_snapshots(keeper.host.rpc, [backup.snapshots])
        peer = keeper.host.peer_id
        await other.host.connect_address(keeper.host.addresses[0], timeout_s=30)
        assert backup.of == STAGE
        assert await keep(keeper, STAGE, head, regroup, state)

        async def told(stage: int) -> BackupHead:
            return (await other.host.rpc.call(peer, HELD_BACKUP, AskBackup(stage), timeout_s=30)).body

        assert await told(STAGE) == BackupHead(head, regroup)
        assert await told(STAGE + 1) == BackupHead(), "of the next stage only"
        fetched = await fetch_commit(other, STAGE, head, (peer,))
        assert hash_state(fetched.tensors).root == head.state_hash


async def test_a_peer_keeps_its_own_stage_before_those_it_keeps_for_others(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    async with context_of(manifest, tmp_path / "home") as (context, _):
        for stage in (STAGE - 1, STAGE):  # what it keeps for others was written last
            head, regroup, state = commit_of(manifest, authority, 7, stage)
            assert await keep(context, stage, head, regroup, state)
        assert kept_stages(context)[0] == STAGE
        note_replica(context, STAGE - 1)
        assert kept_stages(context) == [STAGE - 1, STAGE]


async def test_a_head_that_somebody_made_up_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority's signature is public; what counts is the word of those whom it began the term with."""
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    first = manifest.first_head(STAGE)
    replica, liar = Member(Identity.generate().peer_id, "s"), Member(Identity.generate().peer_id, "s")
    begun = first.regrouped((replica,), 1)
    signed = sign_body(authority, REGROUP_KIND, begun)
    committed = msgspec.structs.replace(begun, round=7, previous=begun.hash)
    made_up = msgspec.structs.replace(committed, round=1 << 40, state_hash=b"lie!" * 8, members=(liar,))

    async def ask_head_reports(*args: object, **more: object) -> list[tuple[str, HeadReport]]:
        said = ((committed, replica), (made_up, liar))
        return [(member.peer, HeadReport(head, member, "compute", signed)) for head, member in said]

    monkeypatch.setattr(backup, "ask_head_reports", ask_head_reports)
    async with context_of(manifest, tmp_path / "home") as (context, _):
        found = await newest_seen(context, STAGE, {})
    assert found is not None and found[0] == committed
