"""A training group with real sockets and invented gradients, for tests of rounds and benchmarks."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from optim.strategies.interface import OuterStrategy
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, HostConfig, open_host
from swarm.coordinator.authority import Authority
from swarm.coordinator.durable_state import DurableState
from swarm.coordinator.handlers import CoordinatorHandlers
from swarm.coordinator.rules import GroupRules
from swarm.protocol.head import MEMBERS_MAX, Head, Member, genesis
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import replay
from swarm.state.fetch import fetch_state
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore
from tests.swarm.support.driven_group import NESTEROV, Deltas, InventedTrainer, Patient, diloco, schedule_of

__all__ = ["Patient", "diloco", "schedule_of"]


@dataclass
class StageReplica:
    """One member: its host, engine, state and events. Implements the engine's `CommitListener`."""

    host: Host
    context: RoundContext
    part_file: object
    snapshots: SnapshotStore
    others: Callable[[], list[str]]
    heads: list[Head] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    engine: Engine = field(init=False)

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        state = self.context.state
        assert state.tree.root == head.state_hash
        self.heads.append(head)
        self.snapshots.publish(state.tree, state.tensors, msgspec.msgpack.encode(head), results)
        self.context.trainer.adopt(state.theta, None, head)

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        donors = list(candidate.holders)  # the peers that answered before the poll ended
        if not await replay(self.context, mine, candidate.head.state_hash, donors):
            told = [peer for peer in self.others() if peer != self.host.peer_id]  # as records in the DHT would
            fetched = await fetch_state(
                self.host.rpc,
                lambda: list(dict.fromkeys([*donors, *told])),
                candidate.head.state_hash,
                self.context.state.size_bytes,
                self.part_file,
                self.context.events,  # type: ignore[arg-type]
            )
            self.context.state.replace(fetched.tensors, fetched.tree)

    def known_peers(self) -> Iterable[str]:
        return self.others()

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


@dataclass
class Group:
    """`members` run until the block ends; `theta` is the initial state."""

    theta: torch.Tensor
    authority_host: Host
    authority: Authority
    schedule: RoundSchedule
    strategy: Callable[[], OuterStrategy]
    rounds: int
    folder: object
    members: list[StageReplica] = field(default_factory=list)
    timeouts: type[AdaptiveTimeouts] = AdaptiveTimeouts

    def genesis(self) -> Head:
        return self.authority.rules.genesis

    @asynccontextmanager
    async def join(self, deltas: Deltas, rounds: int | None = None) -> AsyncIterator[StageReplica]:
        """Add a peer whose engine is ready to `run()`."""
        identity = Identity.generate()
        log = EventLog()
        async with open_host(HostConfig(identity=identity, events=log)) as host:
            await host.connect_address(self.authority_host.addresses[0], timeout_s=30)
            state = OuterState([self.theta.clone(), torch.zeros_like(self.theta)], self.strategy())
            trainer = InventedTrainer(host.peer_id, deltas)
            snapshots = SnapshotStore(state.size_bytes, 8 << 20)
            me = Member(host.peer_id, secrets.token_hex(4))
            context = RoundContext(me, host, state, snapshots, trainer, self.schedule, self.timeouts())
            snapshots.publish(state.tree, state.tensors)
            snapshots.serve(host.rpc)
            member = StageReplica(host, context, self.folder / f"{host.peer_id}.part", snapshots, self._addresses)  # type: ignore[operator]
            rounds = self.rounds if rounds is None else rounds
            per_prefix = self.authority.rules.members_per_prefix
            limits = RunLimits(self.genesis(), self.authority.me.peer, rounds, 64, per_prefix)
            member.engine = Engine(context, limits, self.genesis(), None, member)
            for other in self.members:  # as the DHT would
                host.book.add(other.host.peer_id, other.host.addresses)
                other.host.book.add(host.peer_id, host.addresses)
            self.members.append(member)
            with log.subscribed(member.events.append):
                yield member

    def _addresses(self) -> list[str]:
        return [member.host.peer_id for member in self.members]


@asynccontextmanager
async def open_group(
    folder: object,
    numel: int,
    codec: str = "int8",
    rounds: int = 3,
    min_peers: int = 3,
    steps: int = 4,
    outer: DilocoOuter = NESTEROV,
    members_per_prefix: int = MEMBERS_MAX,
) -> AsyncIterator[Group]:
    """Open a group with an authority that begins the run once `min_peers` ask to join."""
    theta = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    state = OuterState([theta.clone(), torch.zeros_like(theta)], diloco(numel, codec, outer))
    async with (
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host,
        trio.open_nursery() as nursery,
    ):
        first = genesis("run", state.tree.root)
        rules = GroupRules(genesis=first, min_peers=min_peers, members_per_prefix=members_per_prefix)
        authority = Authority(host, rules, DurableState(), list)
        CoordinatorHandlers(host, [authority])
        nursery.start_soon(authority.run)
        yield Group(theta, host, authority, schedule_of(steps), lambda: diloco(numel, codec, outer), rounds, folder)
        nursery.cancel_scope.cancel()
