"""A group on the driver, with real sockets and invented gradients, for tests of rounds and benchmarks.

async with open_driven_group(folder, GroupSetting(numel=40_000)) as group:
    replicas = [await group.enter(deltas) for _ in range(3)]
    await group.until_round(3)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from optim.rules.interface import MergeRule
from optim.rules.registry import MEAN
from optim.strategies.interface import OuterStrategy
from peer.errors import ConnectionLost
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.notifier import Notifier
from swarm.protocol.agreement import actions
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.config import AgreementConfig, Mode
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.head import Head, genesis
from swarm.protocol.plan import Contribution
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.group_driver import DriverOptions, GroupDriver
from swarm.rounds.handlers import serve_agreement, serve_heads
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_actor import ReplicaActor
from swarm.rounds.replica_driver import ReplicaDriver, restore_replica
from swarm.rounds.work import work_of, work_timeout
from swarm.state.outer_state import OuterState
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits
from tests.support.newer_trio import TaskStatus
from tests.swarm.support.group import NESTEROV, Deltas, InventedTrainer, Patient, diloco, schedule_of

Backup = tuple[Sequence[torch.Tensor], Sequence[ChainLink]]
"""The tensors of a state, and the proof of its head."""

STALLED_S = 0.05  # how often a condition is looked at again while nothing is told
NEAR_S = 20.0  # how long a round waits for those on their way to it; a leader gives a contributor up after 22


@dataclass(frozen=True, kw_only=True)
class GroupSetting:
    """What a test's group is like. `agreement`: fields of `AgreementConfig` in place of the defaults."""

    numel: int = 40_000
    codec: str = "int8"
    rounds: int = 0
    min_peers: int = 3
    schedule: RoundSchedule = schedule_of(4)  # noqa: RUF009 - frozen
    outer: DilocoOuter = NESTEROV
    rule: MergeRule = MEAN
    mode: Mode = "witness"
    timeouts: Callable[[], AdaptiveTimeouts] = Patient
    limits: NetLimits = NetLimits()  # noqa: RUF009 - frozen
    exchange_s: float = 60.0
    """How long an exchange may take; longer with each failed attempt of a round: a busy machine has its own pace."""
    snapshots: SnapshotLimits = SnapshotLimits()  # noqa: RUF009 - frozen
    work_s: float = 0.0
    """How long each replica trains a round."""
    keeps_pace: bool = True
    """Whether a round takes longer than others take to fetch the ones before, as it does in earnest, on a machine of
    any pace."""
    agreement: Mapping[str, Any] = field(default_factory=dict)

    def strategy(self) -> OuterStrategy:
        return diloco(self.numel, self.codec, self.outer, self.rule)


class Weightless:
    """The coordinator's actor: it keeps no weights."""

    def __init__(self) -> None:
        self.heads: list[Head] = []

    async def perform(self, action: actions.Action, tasks: trio.Nursery) -> None:
        if isinstance(action, actions.CommitHead):
            self.heads.append(action.head)

    async def save(self, state_hash: bytes) -> None:
        raise AssertionError("a coordinator has no state")


@dataclass(eq=False)
class DrivenReplica:
    """One replica, with what it has committed. Implements the driver's `CommitListener`."""

    host: Host
    driver: ReplicaDriver
    state: OuterState
    snapshots: SnapshotStore
    trainer: InventedTrainer
    others: Callable[[], list[str]]
    changed: Notifier
    events: list[Event]
    """All events of its process, also of its start."""
    heads: list[Head] = field(default_factory=list)
    merged: list[Sequence[Contribution] | None] = field(default_factory=list)
    """The contributions in each of `heads`; None where the state was fetched."""
    stop: trio.CancelScope = field(default_factory=trio.CancelScope)
    gone: trio.Event = field(default_factory=trio.Event)
    moving: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Cancelled, it leaves the group in the midst of whatever it does, and its process stays: as in a move to another
    stage."""

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        assert self.state.tree.root == head.state_hash
        self.heads.append(head)
        self.merged.append(merged)
        self.trainer.adopt(self.state.theta, None, head)
        self.changed.notify()

    def donors(self, head: Head) -> Iterable[str]:
        return self.others()

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    @property
    def peer(self) -> str:
        return self.host.peer_id

    @property
    def head(self) -> Head:
        """The head whose weights are here."""
        return self.driver.head

    @property
    def actor(self) -> ReplicaActor:
        return self.driver.actor


async def until_near(heard: Callable[[], Sequence[DrivenReplica]], changed: Notifier, round: int) -> None:
    """Wait until the peers that a member hears have the head that this round follows, if they get there in time."""
    with trio.move_on_after(NEAR_S):
        while any(member.head.round < round - 1 for member in heard()):
            await changed.wait(STALLED_S)


@dataclass
class DrivenGroup:
    """A group's coordinator, and the way to add replicas."""

    setting: GroupSetting
    folder: Path
    nursery: trio.Nursery
    theta: torch.Tensor
    members: list[DrivenReplica] = field(default_factory=list)
    cut: set[frozenset[str]] = field(default_factory=set)
    """Pairs of peers that cannot call each other."""
    changed: Notifier = field(default_factory=Notifier)
    coordinator_identity: Identity = field(default_factory=Identity.generate)
    coordinator_events: list[Event] = field(default_factory=list)
    failed: Counter[int] = field(default_factory=Counter)
    """Attempts that failed, by round."""
    actor: Weightless = field(default_factory=Weightless)
    coordinator_host: Host = field(init=False)
    coordinator: GroupDriver = field(init=False)
    stop_coordinator: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def genesis(self) -> Head:
        state = OuterState.in_memory([self.theta.clone(), torch.zeros_like(self.theta)], self.setting.strategy())
        return genesis("run", state.tree.root)

    def exchange_s(self, head: Head) -> float:
        """Return how long an exchange after that head may take."""
        return self.setting.exchange_s * (1.0 + self.failed[head.round + 1] / 2)

    # -- peers ---------------------------------------------------------------------------------------------------------

    async def enter(
        self, deltas: Deltas, identity: Identity | None = None, backup: Backup | None = None
    ) -> DrivenReplica:
        """Start a replica. The same identity again is the same peer with its disk."""
        replica: DrivenReplica = await self.nursery.start(self._live, deltas, identity or Identity.generate(), backup)
        return replica

    async def leave(self, replica: DrivenReplica) -> None:
        """End a replica's process, as far as this one can play that: its disk stays."""
        replica.stop.cancel()
        await replica.gone.wait()

    async def _live(
        self,
        deltas: Deltas,
        identity: Identity,
        backup: Backup | None,
        task_status: TaskStatus[DrivenReplica] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        tensors, proof = backup or ((self.theta, torch.zeros_like(self.theta)), ())
        stop, moving, gone, seen = trio.CancelScope(), trio.CancelScope(), trio.Event(), list[Event]()
        async with AsyncExitStack() as stack:
            parts, trainer = await self._open(stack, deltas, identity, tensors, seen)
            host, state, known = parts.host, parts.state, partial(self._known, parts.host.peer_id)
            stack.callback(self.changed.notify)
            stack.callback(gone.set)
            timeout = work_timeout(parts.schedule, parts.timeouts, lambda: trainer.speed)
            work = work_of(state.strategy, parts.schedule, self.exchange_s, timeout)
            with stop:
                with moving, host.rpc.scope():
                    options = DriverOptions(proof=proof)
                    driver = await restore_replica(parts, self.config(host.peer_id), work, known, options)
                    replica = DrivenReplica(host, driver, state, parts.snapshots, trainer, known, self.changed, seen)
                    replica.stop, replica.moving, replica.gone = stop, moving, gone
                    driver.actor.listener = replica
                    self.members.append(replica)
                    try:
                        task_status.started(replica)
                        await driver.run()
                    finally:
                        self.members.remove(replica)
                await trio.sleep_forever()

    async def _open(
        self,
        stack: AsyncExitStack,
        deltas: Deltas,
        identity: Identity,
        tensors: Sequence[torch.Tensor],
        seen: list[Event],
    ) -> tuple[RoundContext, InventedTrainer]:
        log, setting = EventLog(), self.setting
        config = open_host(identity=identity, events=log, limits=setting.limits)
        host = await stack.enter_async_context(config)
        self.obey_cuts(host)
        for other in (self.coordinator_host, *(member.host for member in self.members)):  # as the DHT would
            host.book.add(other.peer_id, other.addresses)
            other.book.add(host.peer_id, host.addresses)
        state = OuterState.in_memory([tensor.clone() for tensor in tensors], setting.strategy())
        trainer = InventedTrainer(host.peer_id, deltas, work_s=setting.work_s)
        if setting.keeps_pace:
            heard = lambda: [m for m in self.members if frozenset((m.peer, host.peer_id)) not in self.cut]  # noqa: E731
            trainer.until_others_are_near = partial(until_near, heard, self.changed)
        snapshots = SnapshotStore(state.size_bytes, 8 << 20, setting.snapshots, log)
        serve_snapshots(host.rpc, [snapshots])
        folder = self.folder / host.peer_id
        stack.enter_context(log.subscribed(partial(self._note, seen)))
        parts = RoundContext(host, state, snapshots, trainer, setting.schedule, setting.timeouts(), folder)
        return parts, trainer

    def config(self, peer: str) -> AgreementConfig:
        setting, coordinator = self.setting, self.coordinator_identity.peer_id
        fields = {"mode": setting.mode, "rounds": setting.rounds, "min_peers": setting.min_peers, **setting.agreement}
        return AgreementConfig(genesis=self.genesis, peer=peer, coordinator=coordinator, **fields)

    def _known(self, me: str) -> list[str]:
        peers = [self.coordinator_identity.peer_id, *(member.peer for member in self.members)]
        return [peer for peer in peers if peer != me and frozenset((peer, me)) not in self.cut]

    def obey_cuts(self, host: Host) -> None:
        """Let calls between peers that are cut off from each other fail, also those under way."""
        rpc: Any = host.rpc
        honest = rpc.call

        async def call(peer: str, *arguments: Any, **options: Any) -> Any:
            pair = frozenset((host.peer_id, peer))
            if pair in self.cut:
                await trio.lowlevel.checkpoint()
                raise ConnectionLost(f"{peer} is cut off")
            answer = await honest(peer, *arguments, **options)
            if pair in self.cut:
                raise ConnectionLost(f"{peer} was cut off")
            return answer

        rpc.call = call

    def part(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Cut peers off from others, until `heal`."""
        self.cut |= {frozenset((one, other)) for one in some for other in others if one != other}

    def heal(self) -> None:
        self.cut.clear()

    async def coordinate(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the coordinator until `stop_coordinator`; started again, it is a new process with its disk."""
        log, setting = EventLog(), self.setting
        config = open_host(identity=self.coordinator_identity, events=log, limits=setting.limits)
        self.stop_coordinator = trio.CancelScope()
        with log.subscribed(partial(self._note, self.coordinator_events)), self.stop_coordinator:
            async with config as host:
                self.obey_cuts(host)
                for member in self.members:
                    member.host.book.add(host.peer_id, host.addresses)
                    host.book.add(member.peer, member.host.addresses)
                work = work_of(setting.strategy(), setting.schedule, self.exchange_s)
                records = RecordFiles(self.folder / "coordinator")
                known = lambda: self._known(host.peer_id)  # noqa: E731
                driver = GroupDriver(host, self.config(host.peer_id), work, records, setting.timeouts(), known)
                self.coordinator_host, self.coordinator = host, driver
                serve_agreement(host.rpc, lambda: {driver.group: driver})
                serve_heads(host.rpc, lambda: {driver.group: driver})
                task_status.started()
                await driver.run(self.actor)

    def _note(self, seen: list[Event], event: Event) -> None:
        seen.append(event)
        if event.name == "attempt_failed":
            self.failed[int(str(event.fields["round"]))] += 1
        self.changed.notify()

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait for anything that a replica commits, tells or is."""
        while not ready():
            await self.changed.wait(STALLED_S)

    async def until_round(self, number: int, replicas: Sequence[DrivenReplica] = ()) -> None:
        """Wait until these replicas (else all) have the weights of that round or a later one."""
        await self.until(lambda: all(r.heads and r.heads[-1].round >= number for r in replicas or self.members))

    def check(self, replicas: Sequence[DrivenReplica] = ()) -> None:
        """Check what must hold in any case: one chain, the same bits, no bug, nobody penalized."""
        replicas = replicas or self.members
        chain: dict[tuple[int, int, int], bytes] = {}
        for replica in replicas:
            assert not replica.seen("bug"), replica.seen("bug")
            assert not replica.seen("peer_penalized"), replica.seen("peer_penalized")
            for head in replica.heads:
                assert chain.setdefault(position_of(head), head.hash) == head.hash, "a fork"
        for one in replicas:
            for other in replicas:
                if one.head == other.head:
                    assert torch.equal(one.state.theta, other.state.theta)

    def tell(self) -> None:
        """Print what happened, for the output of a failed test."""
        told = [(e.at, member.peer[-4:], e) for member in self.members for e in member.events]
        told += [(e.at, "coordinator", e) for e in self.coordinator_events]
        for at, who, event in sorted(told, key=lambda entry: entry[0]):
            print(f"{at % 1000:8.3f} {who} {event.name} {event.fields}")  # noqa: T201


@asynccontextmanager
async def open_driven_group(
    folder: Path, setting: GroupSetting | None = None, timeout_s: float = 500.0
) -> AsyncIterator[DrivenGroup]:
    """Open a group with a coordinator that begins it once `min_peers` ask to join. The block must end in time."""
    setting = setting or GroupSetting()
    theta = torch.randn(setting.numel, generator=torch.Generator().manual_seed(0))
    with trio.fail_after(timeout_s):
        async with trio.open_nursery() as nursery:
            group = DrivenGroup(setting, folder, nursery, theta)
            await nursery.start(group.coordinate)
            try:
                yield group
            except BaseException:
                group.tell()
                raise
            nursery.cancel_scope.cancel()
