"""Downloading a cut model: from the coordinator before the run begins, later from the replicas of each stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
import trio

from cli.templates import template, with_settings
from dht.node import NodeConfig, open_node
from peer.checkpoint.hash_tree import hash_state
from peer.errors import NetworkError
from peer.events import EventLog
from peer.identity import Identity
from peer.model.layout import init_flat
from peer.net.host import open_host
from peer.net.method import Call
from peer.net.reach import LOCAL
from swarm.client import download
from swarm.client.download import Download, download_head
from swarm.client.session import RunClient, open_client
from swarm.coordinator.coordinator import CoordinatorConfig, run_coordinator
from swarm.membership.member_record import MEMBERS, MemberRecord, member_record
from swarm.membership.proven_heads import ProvenHead, ask_proven_heads
from swarm.placement.stages import layout_of, vectors_of
from swarm.protocol import messages
from swarm.protocol.head import Head, Member
from swarm.run.config import parse_run_config
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.status.reading import read_run
from tests.dht.support.local_swarm import BRISK
from tests.swarm.support.donor_child import generation
from tests.swarm.support.stage_commits import begun, started

STAGES = 3
CUT = with_settings(template(), "model", {"layers": 6, "tie_embeddings": False})
CUT = with_settings(with_settings(CUT, "run", {"open": True}), "pipeline", {"stages": STAGES})


@dataclass
class Run:
    """A coordinator in this process, and replicas that only report a head and serve its state."""

    home: Path
    invite: Invite

    @property
    def manifest(self) -> Manifest:
        run_files = load_run_files(self.home)
        assert run_files is not None
        return open_manifest(run_files[0])

    def theta(self, stage: int, round: int) -> torch.Tensor:
        """The weights of that stage in an invented training run."""
        return torch.full((layout_of(self.manifest, stage).numel,), 100.0 * stage + round)

    @asynccontextmanager
    async def replica(self, stage: int, rounds: list[int], serves: bool = True) -> AsyncIterator[None]:
        """The only member of that stage's group: in the first of these `rounds`, and in the next one after each head
        report."""
        manifest, authority = self.manifest, Identity.load_or_create(Home(self.home).identity)
        async with open_host(identity=Identity.generate(), events=EventLog()) as host:
            Gate(host.rpc, manifest, host.identity, self.invite.membership(host.identity))
            me = Member(host.peer_id, "s")
            start = begun(manifest.first_head(stage), me)
            snapshots: SnapshotStore | None = None
            heads: list[Head] = []
            for number in rounds:
                theta = self.theta(stage, number)
                state = [theta, *(torch.zeros_like(theta) for _ in vectors_of(manifest, stage)[1:])]
                tree = hash_state(state)
                snapshots = snapshots or SnapshotStore(tree.size_bytes, 1 << 16)
                snapshots.publish(generation(state, tree))
                heads.append(msgspec.structs.replace(start, round=number, state_hash=tree.root))
            assert snapshots is not None
            if serves:
                serve_snapshots(host.rpc, [snapshots])

            async def report(call: Call[messages.AskHead]) -> messages.HeadReport:
                assert call.body.group == manifest.group_id(stage)
                head = heads.pop(0) if len(heads) > 1 else heads[0]
                return messages.HeadReport(head, me, "training", started(authority, head).links)

            host.rpc.register(messages.HEAD_REPORT, report)
            async with open_node(
                host, NodeConfig(manifest.run_id, self.invite.addresses, tuning=BRISK), [MEMBERS]
            ) as node:
                name, now = f"s{stage}", time.time()
                record = member_record(host, heads[0], session="s", name=name, role="stage", phase="", joined_at=now)
                record = msgspec.structs.replace(record, stage=stage)
                assert await node.put(MEMBERS, manifest.run_id, record, 60.0) >= 2
                yield


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers are in this process: while it stands still none answers."""
    monkeypatch.setattr("swarm.membership.open_peer.NodeConfig", partial(NodeConfig, tuning=BRISK))
    monkeypatch.setattr("swarm.client.session.ask_proven_heads", partial(ask_proven_heads, timeout_s=60.0))


@asynccontextmanager
async def coordinated(home: Path) -> AsyncIterator[Run]:
    """A run of three stages that has not begun."""
    invites: list[Invite] = []
    opened = trio.Event()

    def ready(invite: Invite) -> None:
        invites.append(invite)
        opened.set()

    config = CoordinatorConfig(home, parse_run_config(CUT), reach=LOCAL)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_coordinator, config, ready)
        with trio.fail_after(300):
            await opened.wait()
        yield Run(home, invites[0])
        nursery.cancel_scope.cancel()


async def fetched(run: Run, folder: Path) -> Download:
    with trio.fail_after(300):
        return await download_head(run.invite, folder / "state.part")


async def test_the_coordinator_serves_every_stage(tmp_path: Path) -> None:
    async with coordinated(tmp_path / "home") as run:
        found = await fetched(run, tmp_path)
        assert [head.round for head in found.heads] == [0, 0, 0] and found.donors == 1
        assert [head.state_hash for head in found.heads] == list(run.manifest.genesis)
        assert torch.equal(found.theta, init_flat(run.manifest.model, run.manifest.run.seed))
        async with open_client(run.invite) as client:
            assert client.training == run.manifest
            seen = await read_run(client)
        assert seen.progress[0] == 0 and not any(record.role == "stage" for record in seen.records.values())
    async with coordinated(tmp_path / "home") as again:  # from what is on disk
        assert torch.equal((await fetched(again, tmp_path)).theta, found.theta)


async def test_a_model_is_joined_from_its_stages(tmp_path: Path) -> None:
    async with coordinated(tmp_path / "home") as run, AsyncExitStack() as stack:
        for stage, number in enumerate((5, 4, 5)):
            await stack.enter_async_context(run.replica(stage, [number]))
        found = await fetched(run, tmp_path)
        assert [head.round for head in found.heads] == [5, 4, 5] and found.donors == 3
        parts = [run.theta(0, 5), run.theta(1, 4), run.theta(2, 5)]
        assert torch.equal(found.theta, torch.cat(parts)), "one round apart is as near as stages are"
        async with open_client(run.invite) as client:
            seen = await read_run(client)
        heads = [(p.head.round, len(set(p.head.members).intersection(p.near))) for p in seen.best if p is not None]
        assert heads == [(5, 1), (4, 1), (5, 1)]
        assert sorted(record.stage for record in seen.records.values() if record.role == "stage") == [0, 1, 2]


async def test_a_stage_left_behind_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.1)
    async with coordinated(tmp_path / "home") as run, AsyncExitStack() as stack:
        for stage, rounds in enumerate(([9], [6, 9], [9])):
            await stack.enter_async_context(run.replica(stage, rounds))
        found = await fetched(run, tmp_path)
        assert [head.round for head in found.heads] == [9, 9, 9]
        assert torch.equal(found.theta, torch.cat([run.theta(stage, 9) for stage in range(3)]))


async def test_a_replica_that_did_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority alone knows only the beginning of the run."""
    monkeypatch.setattr(download, "PAUSE_S", 0.1)
    asked, candidates = Counter[int](), RunClient.candidates

    async def late(client: RunClient, records: Mapping[str, MemberRecord], stage: int = 0) -> list[ProvenHead]:
        asked[stage] += 1
        if asked[stage] == 1:
            records = {peer: record for peer, record in records.items() if record.role == "coordinator"}
        return await candidates(client, records, stage)

    monkeypatch.setattr(RunClient, "candidates", late)
    async with coordinated(tmp_path / "home") as run, AsyncExitStack() as stack:
        for stage, number in enumerate((5, 4, 5)):
            await stack.enter_async_context(run.replica(stage, [number]))
        assert [head.round for head in (await fetched(run, tmp_path)).heads] == [5, 4, 5]


async def test_a_stage_that_stays_behind_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.1)
    async with coordinated(tmp_path / "home") as run, AsyncExitStack() as stack:
        for stage, number in enumerate((9, 6, 9)):
            await stack.enter_async_context(run.replica(stage, [number]))
        assert [head.round for head in (await fetched(run, tmp_path)).heads] == [9, 6, 9]


async def test_a_stage_without_holders_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TRIES", 2)
    monkeypatch.setattr(download, "PAUSE_S", 0.1)
    async with coordinated(tmp_path / "home") as run, AsyncExitStack() as stack:
        for stage in range(STAGES):
            await stack.enter_async_context(run.replica(stage, [1], serves=stage != 1))
        with pytest.raises(NetworkError, match="stage 1: "):
            await fetched(run, tmp_path)
