"""A stage's commit outlives its replicas: kept by a peer of the stage before, fetched and checked by a replacement."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from peer.chunks import hash_state
from peer.events import Event, EventLog
from peer.host import Host, HostConfig, open_host
from peer.identity import Identity, Signed, sign_body
from swarm.archive import Archive, keep, restore
from swarm.chain import Head, Member
from swarm.fetch import Fetched
from swarm.ground import Ground, JoinConfig
from swarm.groups import layout_of, open_store, vectors_of
from swarm.home import Home
from swarm.invite import Invite
from swarm.kept import Kept
from swarm.library import serve_shelves
from swarm.manifest import Manifest
from swarm.membership import MemberRecord, Own, describe
from swarm.messages import REGROUP_KIND
from tests.swarm.test_roles import run_of

STAGE = 1


@asynccontextmanager
async def ground_of(manifest: Manifest, home: Path) -> AsyncIterator[tuple[Ground, list[Event]]]:
    """A machine of the run, without what an archive does not need of it."""
    log, seen = EventLog(), list[Event]()
    with log.subscribed(seen.append):
        async with open_host(HostConfig(identity=Identity.generate(), events=log)) as host:
            config = JoinConfig(home, Invite(manifest.run_id, manifest.authority, ()))
            home.mkdir()
            yield Ground(config, Home(home), manifest, host, cast(Any, None), cast(Any, None)), seen


def record_of(host: Host, head: Head, stage: int) -> MemberRecord:
    own = Own(session="s", name="n", role="stage", phase="", joined_at=0.0, stage=stage, since=time.time())
    return describe(host, head, own)


def commit_of(manifest: Manifest, authority: Identity, round: int) -> tuple[Head, Signed, Fetched]:
    """A state of the stage, its head, and the authority's signature of the term."""
    numel = layout_of(manifest, STAGE).numel
    tensors = tuple(torch.full((numel,), float(round + n)) for n in range(len(vectors_of(manifest, STAGE))))
    tree = hash_state(tensors)
    first = manifest.first_head(STAGE).regrouped((Member("gone", "s"),), 1)
    head = msgspec.structs.replace(first, round=round, state_hash=tree.root, previous=first.hash)
    return head, sign_body(authority, REGROUP_KIND, first), Fetched(tensors, tree, {}, 0, 0.0)


async def test_a_replacement_begins_with_what_a_keeper_has(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    head, regroup, state = commit_of(manifest, authority, 7)
    async with ground_of(manifest, tmp_path / "a") as (keeper, _), ground_of(manifest, tmp_path / "b") as (fresh, seen):
        assert await keep(keeper, STAGE, head, regroup, state)
        archive = Archive(keeper, STAGE - 1, dict)
        assert archive.of == STAGE
        serve_shelves(keeper.host.rpc, [archive.lent])
        await fresh.host.connect_address(keeper.host.addresses[0], timeout_s=10)
        records = {keeper.host.peer_id: record_of(keeper.host, head, STAGE - 1)}

        await restore(fresh, STAGE, records)
        kept = await Kept.open(fresh, STAGE)
        assert kept.head == head and kept.state.tree.root == head.state_hash
        assert kept.load_regroup() == regroup
        assert [event.name for event in seen].count("stage_restored") == 1

        await restore(fresh, STAGE, records)
        assert [event.name for event in seen].count("stage_restored") == 1, "it is on our own disk by now"


async def test_a_commit_that_the_authority_did_not_begin_is_not_taken(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(run_of(3), authority=Identity.generate().peer_id)
    head, forged, state = commit_of(manifest, Identity.generate(), 7)
    async with ground_of(manifest, tmp_path / "a") as (keeper, _), ground_of(manifest, tmp_path / "b") as (fresh, _b):
        assert await keep(keeper, STAGE, head, forged, state)
        serve_shelves(keeper.host.rpc, [Archive(keeper, STAGE - 1, dict).lent])
        await fresh.host.connect_address(keeper.host.addresses[0], timeout_s=10)
        await restore(fresh, STAGE, {keeper.host.peer_id: record_of(keeper.host, head, STAGE - 1)})
        assert open_store(fresh.home, manifest, STAGE, fresh.host.identity, EventLog()).load_latest() is None


async def test_a_stage_that_is_served_is_fetched_from_its_replicas_only(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    head, regroup, state = commit_of(manifest, authority, 7)
    async with ground_of(manifest, tmp_path / "a") as (keeper, _), ground_of(manifest, tmp_path / "b") as (fresh, _b):
        assert await keep(keeper, STAGE, head, regroup, state)
        serve_shelves(keeper.host.rpc, [Archive(keeper, STAGE - 1, dict).lent])
        await fresh.host.connect_address(keeper.host.addresses[0], timeout_s=10)
        records = {
            keeper.host.peer_id: record_of(keeper.host, head, STAGE - 1),
            "a replica": record_of(keeper.host, head, STAGE),
        }
        await restore(fresh, STAGE, records)
        assert open_store(fresh.home, manifest, STAGE, fresh.host.identity, EventLog()).load_latest() is None
