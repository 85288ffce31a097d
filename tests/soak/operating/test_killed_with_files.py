"""A peer whose state lies in files ends at any moment of rounds, checkpoints and fetches, by a kill or a power cut: it
comes back where its votes and what it has told of demand."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import msgspec
import pytest
import torch
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import open_host
from swarm.protocol.agreement.records import BALLOT_KEY, BallotRecord
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_driver import ReplicaDriver, restore_replica
from swarm.rounds.work import work_of
from swarm.run.agreement import agreement_config, schedule_of
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.manifest_transfer import load_manifest
from swarm.run.owners_pause import OwnersPause
from swarm.run.peer_context import JoinConfig, PeerContext
from swarm.state.snapshots import SnapshotStore
from swarm.training.checkpoints import LocalCheckpoint
from tests.support.disk.shadow_disk import Moment, put_back
from tests.support.disk.watched_peer import read_moments
from tests.support.process_group import Launch
from tests.swarm.support.group import InventedTrainer
from tests.swarm.support.swarm_harness import Swarm, open_swarm

pytestmark = [pytest.mark.soak, pytest.mark.process]

DEATHS: Final = 40
DISK: Final = ("--state", "disk")
BEFORE: Final = ("identity.key", "manifest.msgpack", "invite")  # were written long before


def told_of(home: Path) -> int:
    """Return the last round that the peer of that home has told of."""
    lines = (home / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((e["round"] for e in events if e["event"] in ("round_committed", "head_adopted")), default=0)


@asynccontextmanager
async def come_back(home: Path, manifest: Manifest) -> AsyncIterator[tuple[LocalCheckpoint, ReplicaDriver]]:
    """Start as `peer join` does, up to where the network and the worker begin."""
    log, seen = EventLog(), list[Event]()
    with log.subscribed(seen.append):
        async with open_host(identity=Identity.load_or_create(Home(home).identity), events=log) as host:
            config = JoinConfig(home, Invite(manifest.run_id, manifest.authority, ()), state="disk")
            none = cast(Any, None)
            context = PeerContext(host, Home(home), manifest, config, none, none, OwnersPause(log, home / "paused"))
            local = await LocalCheckpoint.open(context, 0)
            schedule, timeouts = schedule_of(manifest, 0), AdaptiveTimeouts(60.0)
            trainer = InventedTrainer(host.peer_id, lambda *_: torch.zeros(local.state.numel))
            snapshots = SnapshotStore(local.state.size_bytes, 8 << 20)
            parts = RoundContext(host, local.state, snapshots, trainer, schedule, timeouts, home)
            work = work_of(local.state.strategy, schedule, lambda head: 60.0)
            yield local, await restore_replica(parts, agreement_config(manifest, 0, host.peer_id), work, lambda: ())
            assert not [event for event in seen if "damaged" in event.name or event.name == "checkpoint_skipped"]


async def check_home(home: Path, manifest: Manifest, told: int, what: str) -> None:
    """Check that the peer of this home, which is changed, stands at its head, keeps what it has voted for, and knows
    all that it has told of."""
    record = RecordFiles(home / "agreement").read().get(BALLOT_KEY)
    ballot = msgspec.msgpack.decode(record, type=BallotRecord) if record else None
    async with come_back(home, manifest) as (local, driver):
        head, state = driver.group.head, local.state
        assert hash_state(state.tensors).root == state.tree.root, what
        assert head.round >= told, f"{what}: it stands at round {head.round} and has told of {told}"
        assert state.tree.root == head.state_hash or local.head.round < 0, f"{what}: these are other weights"
        if ballot is not None and ballot.accepted is not None and ballot.head == head.hash:
            assert ballot.accepted.value.state_hash in driver.actor.builder.holds, f"{what}: what it voted for is gone"


def manifest_of(swarm: Swarm) -> Manifest:
    manifest = load_manifest(swarm.coordinator.home)
    assert isinstance(manifest, Manifest)
    return manifest


async def test_a_peer_that_is_killed_comes_back_where_it_was(tmp_path: Path) -> None:
    random = Random(59)
    async with open_swarm(tmp_path, min_peers=2, steps=4) as swarm:
        others = [swarm.join(f"p{number}", *DISK) for number in range(2)]
        await swarm.committed(1, *others)
        killed = swarm.join("p2", *DISK)
        for death in range(DEATHS):
            since = killed.mark()
            if random.random() < 0.8:  # else it dies as it starts, or fetches
                await killed.wait_for("round_committed", since=since)
            await trio.sleep(random.uniform(0.0, 2.0))  # the drawn moment
            killed.kill()
            aside = tmp_path / f"death-{death}"
            shutil.copytree(killed.home, aside)
            if (aside / "agreement").exists():
                await check_home(aside, manifest_of(swarm), told_of(aside), f"death {death}")
            shutil.rmtree(aside)
            swarm.restart(killed)
        await swarm.committed(max(peer.round for peer in others) + 2)


async def test_a_power_cut_at_any_moment_leaves_what_was_told_of(tmp_path: Path) -> None:
    watched = Launch(module="tests.support.disk.watched_peer")
    launch = lambda name: watched if name == "p2" else Launch()  # noqa: E731
    async with open_swarm(tmp_path, min_peers=2, steps=4, launch=launch) as swarm:
        others = [swarm.join(f"p{number}", *DISK) for number in range(2)]
        await swarm.committed(3, *others)
        late = swarm.join("p2", *DISK)  # fetches the state
        await late.wait_for("round_committed")
        await swarm.committed(late.round + 12, late)
        late.freeze()
        await swarm.committed(late.round + 6, *others)
        late.thaw()  # fetches what it has missed
        await swarm.committed(others[0].round + 12, late)
        late.interrupt()
        assert await late.wait_exit() == 130
        manifest, home = manifest_of(swarm), late.home
    moments = [one for one in read_moments(home) if any(path.parts[0] == "agreement" for path in one.synced)]
    assert len(moments) > 3 * DEATHS
    random = Random(59)
    for cut, moment in enumerate(random.choices(moments, k=2 * DEATHS)):
        again = tmp_path / f"cut-{cut}"
        again.mkdir()
        share = 1.0 if cut % 2 else random.choice((0.0, 0.5))
        put_back(_after(moment, random, share), again)
        (again / "identity.key").chmod(0o600)
        told = tmp_path / f"told-{cut}"
        told.mkdir()
        put_back({Path("events.jsonl"): moment.written.get(Path("events.jsonl"), b"")}, told)
        await check_home(again, manifest, told_of(told), f"cut {cut} with {share:.0%} of what was not synced")
        shutil.rmtree(again)


def _after(moment: Moment, random: Random, share: float) -> dict[Path, bytes]:
    there = moment.after_a_cut(random, share)
    return there | {path: data for path, data in moment.written.items() if path.name in BEFORE}
