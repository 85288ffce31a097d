"""A group on the driver, with real sockets and invented gradients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from optim.strategies.interface import OuterStrategy
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, HostConfig, open_host
from swarm.protocol.agreement import actions
from swarm.protocol.agreement.config import AgreementConfig, Mode
from swarm.protocol.head import Head, genesis
from swarm.protocol.plan import Contribution
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.driver.group_driver import GroupDriver
from swarm.rounds.driver.handlers import serve_agreement
from swarm.rounds.driver.records import RecordFiles
from swarm.rounds.driver.replica_driver import ReplicaDriver, ReplicaParts
from swarm.rounds.driver.work import work_of
from swarm.rounds.round_state import Notifier
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore
from tests.swarm.support.group import NESTEROV, Deltas, InventedTrainer, diloco, schedule_of


class Weightless:
    """The coordinator's actor: it keeps no weights."""

    def __init__(self) -> None:
        self.heads: list[Head] = []

    async def perform(self, action: actions.Action) -> None:
        if isinstance(action, actions.CommitHead):
            self.heads.append(action.head)

    async def save(self, state_hash: bytes) -> None:
        raise AssertionError("a coordinator has no state")


@dataclass
class DrivenReplica:
    """One replica, with what it has committed."""

    host: Host
    driver: ReplicaDriver
    state: OuterState
    snapshots: SnapshotStore
    trainer: InventedTrainer
    others: Callable[[], list[str]]
    heads: list[Head] = field(default_factory=list)
    commits: Notifier = field(default_factory=Notifier)
    events: list[Event] = field(default_factory=list)

    async def committed(self, head: Head, merged: Sequence[Contribution] | None, results: list[memoryview]) -> None:
        assert self.state.tree.root == head.state_hash
        self.heads.append(head)
        self.snapshots.publish(self.state.tree, self.state.tensors, msgspec.msgpack.encode(head), results)
        self.trainer.adopt(self.state.theta, None, head)
        self.commits.notify()

    def donors(self, head: Head) -> Iterable[str]:
        return self.others()

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    async def until_round(self, number: int) -> None:
        """Wait until the weights of that round are here."""
        while not self.heads or self.heads[-1].round < number:
            await self.commits.wait(60.0)


@dataclass
class DrivenGroup:
    """A group's coordinator, and the way to add replicas."""

    theta: torch.Tensor
    coordinator_host: Host
    coordinator: GroupDriver
    actor: Weightless
    schedule: RoundSchedule
    strategy: Callable[[], OuterStrategy]
    rounds: int
    mode: Mode
    min_peers: int
    folder: Path
    events: list[Event]
    members: list[DrivenReplica] = field(default_factory=list)

    @asynccontextmanager
    async def join(self, deltas: Deltas, identity: Identity | None = None) -> AsyncIterator[DrivenReplica]:
        """Run a replica inside the block. The same identity again is the same peer, with its disk."""
        identity, log = identity or Identity.generate(), EventLog()
        async with open_host(HostConfig(identity=identity, events=log)) as host, trio.open_nursery() as nursery:
            await host.connect_address(self.coordinator_host.addresses[0], timeout_s=30)
            state = OuterState([self.theta.clone(), torch.zeros_like(self.theta)], self.strategy())
            trainer = InventedTrainer(host.peer_id, deltas)
            snapshots = SnapshotStore(state.size_bytes, 8 << 20)
            snapshots.publish(state.tree, state.tensors)
            snapshots.serve(host.rpc)
            timeouts = AdaptiveTimeouts()
            folder = self.folder / host.peer_id
            parts = ReplicaParts(host, state, snapshots, trainer, self.schedule, timeouts, folder)
            work = work_of(state.strategy, self.schedule, lambda head: 20.0)
            driver = ReplicaDriver(parts, self.config(host.peer_id), work, lambda: self._known(host.peer_id))
            replica = DrivenReplica(host, driver, state, snapshots, trainer, lambda: self._known(host.peer_id))
            for other in self.members:  # as the DHT would
                host.book.add(other.host.peer_id, other.host.addresses)
                other.host.book.add(host.peer_id, host.addresses)
            self.members.append(replica)
            with log.subscribed(replica.events.append):
                await driver.begin(replica)
                nursery.start_soon(driver.run)
                yield replica
                nursery.cancel_scope.cancel()
        self.members.remove(replica)

    def config(self, peer: str) -> AgreementConfig:
        return AgreementConfig(
            genesis=self.coordinator.config.genesis,
            peer=peer,
            coordinator=self.coordinator_host.peer_id,
            mode=self.mode,
            rounds=self.rounds,
            min_peers=self.min_peers,
        )

    def _known(self, me: str) -> list[str]:
        return [m.host.peer_id for m in self.members if m.host.peer_id != me] + [self.coordinator_host.peer_id]


@asynccontextmanager
async def open_driven_group(
    folder: Path,
    numel: int,
    codec: str = "int8",
    rounds: int = 3,
    min_peers: int = 3,
    steps: int = 4,
    outer: DilocoOuter = NESTEROV,
    mode: Mode = "witness",
) -> AsyncIterator[DrivenGroup]:
    """Open a group with a coordinator that begins it once `min_peers` ask to join."""
    theta = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    state = OuterState([theta.clone(), torch.zeros_like(theta)], diloco(numel, codec, outer))
    schedule, log, seen = schedule_of(steps), EventLog(), []
    async with (
        open_host(HostConfig(identity=Identity.generate(), events=log)) as host,
        trio.open_nursery() as nursery,
    ):
        config = AgreementConfig(
            genesis=genesis("run", state.tree.root),
            peer=host.peer_id,
            coordinator=host.peer_id,
            mode=mode,
            rounds=rounds,
            min_peers=min_peers,
        )
        work = work_of(state.strategy, schedule, lambda head: 20.0)
        found: list[DrivenGroup] = []
        coordinator = GroupDriver(
            host,
            config,
            work,
            RecordFiles(folder / "coordinator"),
            AdaptiveTimeouts(),
            lambda: [member.host.peer_id for group in found for member in group.members],
        )
        actor = Weightless()
        coordinator.begin([])
        serve_agreement(host.rpc, lambda: {coordinator.group: coordinator})
        nursery.start_soon(coordinator.run, actor)
        group = DrivenGroup(
            theta,
            host,
            coordinator,
            actor,
            schedule,
            lambda: diloco(numel, codec, outer),
            rounds,
            mode,
            min_peers,
            folder,
            seen,
        )
        found.append(group)
        with log.subscribed(seen.append):
            yield group
        nursery.cancel_scope.cancel()
