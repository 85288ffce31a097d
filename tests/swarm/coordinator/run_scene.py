"""A run's coordinator as its process has it, and replicas with invented gradients, over real sockets.

async with open_run(folder, make_run(identity, min_peers=2)) as run:
    replica = await run.enter(stage=0)
    await run.until(lambda: run.seen("head_seen"))
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from optim.config import DilocoConfig
from optim.strategies.registry import build_strategy
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.config import InnerConfig, ModelConfig
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.ipc.span import spans_of
from peer.model.layout import FlatLayout
from peer.net.host import Host, open_host
from peer.notifier import Notifier
from swarm.coordinator.coordinated_group import CoordinatedGroup, Disk
from swarm.coordinator.last_states import LastStates
from swarm.coordinator.regroup import serve_requests
from swarm.coordinator.run_progress import RunProgress
from swarm.placement.stages import layout_of, open_store, state_bytes
from swarm.protocol.plan import Assignment
from swarm.rounds.context import RoundContext
from swarm.rounds.group_driver import DriverOptions
from swarm.rounds.handlers import serve_agreement, serve_heads
from swarm.rounds.replica_driver import restore_replica
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.work import work_of
from swarm.run.agreement import agreement_config, schedule_of
from swarm.run.home import Home
from swarm.run.manifest import Manifest, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from swarm.run.peer_context import Place
from swarm.run.sections import PipelineConfig, RunRules
from swarm.state.outer_state import OuterState
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from tests.support.newer_trio import TaskStatus
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.support.driven_group import STALLED_S, DrivenReplica, until_near
from tests.swarm.support.group import InventedTrainer, Patient


def make_run(authority: str, stages: int = 1, **rules: object) -> Manifest:
    """Return the manifest of a tiny model, whose first weights are zeros."""
    model = ModelConfig(
        hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
    )
    cuts = ((0, 2),) if stages == 1 else tuple((stage, stage + 1) for stage in range(stages))
    sizes = [FlatLayout.of(model, span).numel for span in spans_of(cuts)]
    usual: dict[str, object] = {"name": "a run", "open": True, "min_peers": 1, "members_per_prefix": 64}
    usual["coordinator"] = "witness" if stages == 1 else "required"
    return make_manifest(
        authority,
        run=RunRules(**(usual | rules)),  # type: ignore[arg-type]
        model=model,
        inner=InnerConfig(lr=1e-3, batch_size=2, total_steps=100),
        outer=DilocoConfig(steps=4),
        pipeline=PipelineConfig(stages=stages),
        cuts=cuts,
        genesis=tuple(hash_state([torch.zeros(size), torch.zeros(size)]).root for size in sizes),
    )


class Idle(InventedTrainer):
    """A replica of a stage to which no micro-batch comes."""

    async def train(self, request: TrainRequest) -> TrainResult:
        await trio.sleep_forever()


@dataclass
class CoordinatedRun:
    """One run, with its coordinator and replicas."""

    manifest: Manifest
    identity: Identity
    home: Home
    nursery: trio.Nursery
    members: dict[int, list[DrivenReplica]] = field(default_factory=dict)
    """By stage."""
    events: list[Event] = field(default_factory=list)
    changed: Notifier = field(default_factory=Notifier)
    host: Host = field(init=False)
    groups: list[CoordinatedGroup] = field(init=False)
    stores: list[SnapshotStore] = field(init=False)
    last_states: LastStates = field(init=False)
    stop: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def coordinate(
        self, restored: bool = False, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the coordinator until `stop`; started again, it is a new process with its disk."""
        log, manifest = EventLog(), self.manifest
        with self.home.locked(), log.subscribed(self._note), trio.CancelScope() as self.stop:
            async with (
                open_host(identity=self.identity, events=log) as host,
                trio.open_nursery() as nursery,
            ):
                for other in self._replicas():
                    _introduce(host, other.host)
                progress = RunProgress(synchronous=False, source=manifest.group_id(0))
                disk: Disk = "restored" if restored else "new"
                self.host = host
                self.groups = [
                    CoordinatedGroup(host, manifest, stage, self.home, self._known_in(stage), progress, disk)
                    for stage in range(manifest.stages)
                ]
                drivers = {group.group: group.driver for group in self.groups}
                serve_agreement(host.rpc, lambda: drivers)
                serve_heads(host.rpc, lambda: drivers)
                self.stores = [self._store(stage, log) for stage in range(manifest.stages)]
                serve_snapshots(host.rpc, self.stores)
                place = Place(host, self.home, manifest)
                self.last_states = LastStates(place, self.groups, self.stores, trio.lowlevel.checkpoint)
                nursery.start_soon(self.last_states.run)
                for group in self.groups:
                    nursery.start_soon(group.run)
                nursery.start_soon(serve_requests, self.home, self.groups, log)
                task_status.started()

    def _store(self, stage: int, log: EventLog) -> SnapshotStore:
        """Serve what the coordinator's disk has of a stage, at first nothing."""
        store = SnapshotStore(state_bytes(self.manifest, stage), 1 << 16)
        found = open_store(self.home, self.manifest, stage, self.identity, log).load_latest()
        if found is not None:
            store.publish(StateGeneration(found.tensors, found.tree))
        return store

    async def restart(self, restored: bool = False) -> None:
        """End the coordinator's process and start another one."""
        self.stop.cancel()
        await self.until(lambda: not self.home.is_in_use)
        self.events.clear()
        await self.nursery.start(self.coordinate, restored)

    async def enter(self, stage: int = 0, identity: Identity | None = None) -> DrivenReplica:
        """Start a replica. The same identity again is the same peer with its disk."""
        replica: DrivenReplica = await self.nursery.start(self._live, stage, identity or Identity.generate())
        return replica

    async def leave(self, replica: DrivenReplica) -> None:
        replica.stop.cancel()
        await replica.gone.wait()

    async def _live(
        self, stage: int, identity: Identity, task_status: TaskStatus[DrivenReplica] = trio.TASK_STATUS_IGNORED
    ) -> None:
        log, manifest, mates = EventLog(), self.manifest, self.members.setdefault(stage, [])
        async with open_host(identity=identity, events=log) as host:
            for other in (self.host, *(replica.host for replica in self._replicas())):
                _introduce(host, other)
            layout = layout_of(manifest, stage)
            strategy = build_strategy(manifest.outer, manifest.codec, layout, manifest.inner)
            state = OuterState.in_memory([torch.zeros(layout.numel), torch.zeros(layout.numel)], strategy)
            snapshots = SnapshotStore(state.size_bytes, 8 << 20)
            snapshots.publish(state.current)
            serve_snapshots(host.rpc, [snapshots])
            kind = InventedTrainer if manifest.stages == 1 else Idle
            trainer = kind(host.peer_id, _deltas(layout.numel), work_s=0.05)
            trainer.until_others_are_near = partial(until_near, lambda: mates, self.changed)
            schedule, timeouts = schedule_of(manifest, stage), Patient()
            parts = RoundContext(host, state, snapshots, trainer, schedule, timeouts, self.home.path / host.peer_id)
            config = agreement_config(manifest, stage, host.peer_id)
            work, known = work_of(strategy, schedule, lambda head: 60.0), self._known_in(stage)
            options, seen = DriverOptions(per_prefix=manifest.run.members_per_prefix), list[Event]()

            def note(event: Event) -> None:
                seen.append(event)
                self.changed.notify()

            with log.subscribed(note):
                driver = await restore_replica(parts, config, work, known, options)
                replica = DrivenReplica(host, driver, state, snapshots, trainer, known, self.changed, seen)
                driver.actor.listener = replica
                mates.append(replica)
                try:
                    with replica.stop:
                        task_status.started(replica)
                        await driver.run()
                finally:
                    mates.remove(replica)
                    replica.gone.set()
                    self.changed.notify()

    def _replicas(self) -> list[DrivenReplica]:
        return [replica for mates in self.members.values() for replica in mates]

    def _known_in(self, stage: int) -> Callable[[], list[str]]:
        return lambda: [self.identity.peer_id, *(replica.peer for replica in self.members.get(stage, ()))]

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if trio.lowlevel.in_trio_task():  # type: ignore[attr-defined]  # the stubs are of an older trio
            self.changed.notify()
        else:  # a checkpoint is written in a thread
            trio.from_thread.run_sync(self.changed.notify)

    def seen(self, name: str, **fields: Any) -> list[Event]:
        """Return the coordinator's events of that name that have these fields."""
        return [event for event in self.events if event.name == name and fields.items() <= event.fields.items()]

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait for anything that a peer commits, tells or is."""
        while not ready():
            await self.changed.wait(STALLED_S)


def _introduce(one: Host, other: Host) -> None:
    """Let both know each other's addresses, as the DHT would."""
    one.book.add(other.peer_id, other.addresses)
    other.book.add(one.peer_id, one.addresses)


def _deltas(numel: int) -> Callable[[str, int, Assignment], torch.Tensor]:
    def delta(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
        seed = sum(peer.encode()) * 1000 + first_step
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-2

    return delta


@asynccontextmanager
async def open_run(
    folder: Path, timeout_s: float = 400.0, stages: int = 1, **rules: object
) -> AsyncIterator[CoordinatedRun]:
    """Open a run with these rules and its coordinator. The block must end in time."""
    home = Home(folder / "coordinator")
    identity = Identity.load_or_create(home.identity)
    manifest = make_run(identity.peer_id, stages, **rules)
    save_run_files(home.path, sign_manifest(identity, manifest), b"")
    with trio.fail_after(timeout_s):
        async with trio.open_nursery() as nursery:
            run = CoordinatedRun(manifest, identity, home, nursery)
            await nursery.start(run.coordinate)
            try:
                yield run
            except BaseException:
                for event in run.events:
                    print(event)  # noqa: T201
                raise
            nursery.cancel_scope.cancel()
