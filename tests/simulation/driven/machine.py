"""One peer's machine: a folder, and the processes of the real driver that run from it one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import trio
from blake3 import blake3

from peer.checkpoint.hash_tree import hash_state
from peer.identity import Signed
from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.head import Head
from swarm.protocol.ledger import head_of
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.group_driver import GroupDriver
from swarm.rounds.handlers import serve_agreement, serve_heads
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_driver import ReplicaDriver, restore_replica
from swarm.rounds.trainers.contribution import Contributor, EncodedUpdate
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.work import work_of, work_timeout
from swarm.state.outer_state import OuterState
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from tests.simulation.driven.disk import PeerDisk
from tests.simulation.driven.lying_slices import SliceLiar
from tests.simulation.driven.network import MemoryHost, MemoryRpc
from tests.simulation.setups import COORDINATOR
from tests.simulation.tensors import SCHEDULE
from tests.swarm.support.group import diloco

if TYPE_CHECKING:
    from tests.simulation.driven.world import DrivenWorld

NUMEL = 512
CODEC = "bf16"  # any granule: int8 would make one slice of all values
SNAPSHOT_BYTES = 1 << 20

_feed, _do = GroupDriver.feed, GroupDriver._do
_contribute, _merge = Contributor.contribute, SliceExchange._merge


@contextmanager
def watched(machine_of: Callable[[str], DrivenMachine]) -> Iterator[None]:
    """Stand between the drivers and their nodes inside the block."""

    def feed(group: GroupDriver, event: events.Event) -> None:
        machine_of(group.config.peer).fed(group, event)

    async def do(group: GroupDriver, *arguments: Any) -> None:
        await machine_of(group.config.peer).done(group, *arguments)

    async def contribute(contributor: Contributor, *arguments: Any) -> tuple[Signed, EncodedUpdate | None]:
        signed, update = await _contribute(contributor, *arguments)
        return machine_of(contributor._context.me.peer).contributed(signed), update

    def merge(exchange: SliceExchange, index: int) -> tuple[memoryview, bytes]:
        result, name = _merge(exchange, index)
        liar = machine_of(exchange._me).liar
        if liar is None:
            return result, name
        said = memoryview(liar.result(exchange.order.key, index, bytes(result)))
        return said, blake3(said).digest()

    with (
        patch.object(GroupDriver, "feed", feed),
        patch.object(GroupDriver, "_do", do),
        patch.object(Contributor, "contribute", contribute),
        patch.object(SliceExchange, "_merge", merge),
    ):
        yield


def first_state() -> list[torch.Tensor]:
    """Return the weights and the momentum with which every peer begins."""
    theta = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    return [theta, torch.zeros(NUMEL)]


class DrivenMachine:
    """A machine and the process on it, with the face of `tests.simulation.machine.Machine`. `life` counts processes."""

    def __init__(self, world: DrivenWorld, peer: str, config: AgreementConfig, disk: PeerDisk) -> None:
        self.world, self.peer, self.config = world, peer, config
        self.disk = disk
        self.life, self.frozen_until = 0, 0.0
        self.train_s, self.sync_s, self.fetch_s = 0.5, 0.005, 0.1
        self.alone = trio.Lock()
        self.lives_left: int | None = None
        self.dies_as, self.restored, self.rate = "kept", False, 1.0
        self.suspects: set[str] = set()
        self.rpc: MemoryRpc | None = None
        self.group: GroupDriver | None = None
        self.replica: ReplicaDriver | None = None
        self.state: OuterState | None = None
        self._scope: trio.CancelScope | None = None
        self._held: list[events.Event] = []
        self._base = b""
        self._build: dict[Any, tuple[bytes, Any]] = {}
        self._finish = trio.Event()
        self.speed = 0.0
        self._schedule = replace(SCHEDULE, bundled=world.setup.bundled)

    @property
    def is_coordinator(self) -> bool:
        return self.peer == COORDINATOR

    @property
    def liar(self) -> SliceLiar | None:
        """The lie of what this machine says, if it has one."""
        return self.world.liars.get(self.peer)

    @property
    def is_honest(self) -> bool:
        return self.liar is None

    @property
    def slices(self) -> Sequence[memoryview]:
        """This peer's own encoded slices of the latest update."""
        update = self.replica.actor.training.update if self.replica is not None else None
        return update.slices if update is not None else ()

    @property
    def up(self) -> bool:
        return self.rpc is not None

    @property
    def node(self) -> AgreementNode | None:
        return self.group._node if self.group is not None else None

    def has(self, state: bytes) -> bool:
        """Whether this machine has that state, or can rebuild it."""
        replica = self.replica
        return replica is not None and (state in replica.actor.builder.holds or self.disk.holds(state))

    def step(self, event: events.Event) -> None:
        if self.group is not None:
            self.group.feed(event)

    async def awake(self) -> None:
        """Wait until the process is not frozen."""
        while self.frozen_until > self.world.now:
            await trio.sleep_until(self.world.began + self.frozen_until)

    # -- process -------------------------------------------------------------------------------------------------------

    def stop(self, kind: str) -> None:
        """End the process. What this kind of crash does to the disk comes once all its tasks have ended."""
        assert self._scope is not None and self.rpc is not None
        self.dies_as, self.life = kind, self.life + 1
        self.rpc.end()
        self._scope.cancel()
        self.rpc = self.group = self.replica = self.state = None

    async def live(self) -> None:
        """Run one process on what the disk holds, until it is stopped."""
        self.life += 1
        self.frozen_until, self.lives_left, self._held = 0.0, None, []
        self.suspects.clear()
        host: Any = MemoryHost(self.world, self)
        self.rpc = host.rpc
        with host.events.subscribed(self.world.emitted(self)), trio.CancelScope() as self._scope:
            if self.is_coordinator:
                await self._coordinate(host)
            else:
                await self._train(host)
        self.disk.crash(self.dies_as)
        if self.dies_as == "wiped":
            self.world.invariants.wiped(self.peer)

    def _known(self) -> Iterable[str]:
        machines = self.world.machines.values()
        return [m.peer for m in machines if m.up and m is not self and not self.world.network.is_cut(m.peer, self.peer)]

    async def _coordinate(self, host: Any) -> None:
        strategy = diloco(NUMEL, CODEC)
        work = work_of(strategy, self._schedule, lambda head: 4.0)
        records = RecordFiles(self.disk.root / "agreement")
        group = GroupDriver(host, self.config, work, records, AdaptiveTimeouts(), self._known)
        serve_agreement(host.rpc, lambda: {group.group: group})
        serve_heads(host.rpc, lambda: {group.group: group})
        self.world.started(self)
        await group.run(SimpleNamespace(perform=self._perform_nothing))

    async def _train(self, host: Any) -> None:
        self.state = OuterState.in_memory(first_state(), diloco(NUMEL, CODEC))
        snapshots = SnapshotStore(self.state.size_bytes, SNAPSHOT_BYTES)
        serve_snapshots(host.rpc, [snapshots])
        timeouts = AdaptiveTimeouts()
        parts = RoundContext(host, self.state, snapshots, self, self._schedule, timeouts, self.disk.root)
        timeout = work_timeout(self._schedule, timeouts, lambda: self.speed)
        work = work_of(self.state.strategy, self._schedule, lambda head: 4.0, timeout)
        self.replica = replica = await restore_replica(parts, self.config, work, self._known)
        replica.actor.listener = self
        perform = replica.actor.perform

        async def performed(action: actions.Action, tasks: trio.Nursery) -> None:
            await self._before(action)
            await perform(action, tasks)
            if isinstance(action, actions.CommitHead):
                self._judge_weights(action)
                self.world.committed(self, action)

        replica.actor.perform = performed  # type: ignore[method-assign]
        self.world.started(self)
        await replica.run()

    def fed(self, group: GroupDriver, event: events.Event) -> None:
        """Hand an event to a driver, but not while the process is frozen."""
        if isinstance(event, events.Started):
            self.group = group
        if self.frozen_until > self.world.now:
            if not self._held:
                self.world.at(self.frozen_until + 1e-4, self, partial(self._thaw, group))
            self._held.append(event)
            return
        self._judge_slices(event)
        if isinstance(event, events.Built) and event.state_hash is not None and event.key in self._build:
            base, roster = self._build[event.key]
            if event.state_hash not in self.world.tensors.states:
                self.world.tensors.note(event.state_hash, base, roster)
        _feed(group, event)

    def _thaw(self, group: GroupDriver) -> None:
        held, self._held = self._held, []
        for event in held:
            self.fed(group, event)

    async def done(self, group: GroupDriver, action: actions.Action, actor: Any, tasks: trio.Nursery) -> None:
        """Have a driver carry out an action, unless the process dies of it."""
        if self.lives_left is not None:
            self.lives_left -= 1
            if self.lives_left < 0:
                self.world.crash(self, self.dies_as)
                await trio.sleep_forever()
        if isinstance(action, actions.Send):
            self.world.sent(self, action.peer, action.message)
        await _do(group, action, actor, tasks)

    async def _perform_nothing(self, action: actions.Action, tasks: trio.Nursery) -> None:
        if isinstance(action, actions.CommitHead):
            self.world.committed(self, action)

    async def _before(self, action: actions.Action) -> None:
        await trio.lowlevel.checkpoint()
        if isinstance(action, actions.MergeSlices | actions.Build) and self.replica is not None:
            self._build[action.roster.key] = (self.replica.head.state_hash, action.roster)

    def contributed(self, signed: Signed) -> Signed:
        """Return the contribution that this peer signs."""
        if self.liar is None:
            return signed
        signatures = self.world.signatures
        body = self.liar.contribution(signatures.open(signed, CONTRIBUTION_KIND, Contribution))
        return signatures.of(self.peer).sign(CONTRIBUTION_KIND, body)

    def _judge_slices(self, event: events.Event) -> None:
        """Judge what an honest driver has merged, and built, of what liars have said."""
        if not self.is_honest or self.replica is None or not self.world.liars:
            return
        if isinstance(event, events.SliceResult) and event.key in self._build:
            self.world.merged(self, self._build[event.key][1].merged, event.index)
        elif isinstance(event, events.Built) and event.state_hash is not None:
            exchange = self.replica.actor.exchanges.get(event.key)
            if exchange is not None:
                self.world.built(self, {name for name, _ in exchange.results.values()})

    def _judge_weights(self, action: actions.CommitHead) -> None:
        state = self.state if self.is_honest else None
        if state is not None and hash_state(state.tensors).root != action.head.state_hash:
            self.world.broken("5 weights", f"{self.peer} stands at round {action.head.round} with other weights")

    # -- the driver's listener -----------------------------------------------------------------------------------------

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        await trio.lowlevel.checkpoint()
        self.world.stood(self, head, merged is not None)

    def donors(self, head: Head) -> Iterable[str]:
        return self._known()

    # -- the driver's trainer ------------------------------------------------------------------------------------------

    async def train(self, request: TrainRequest) -> TrainResult:
        """Return an invented gradient after the time that this machine takes, or for fewer steps before."""
        assignment, began = request.assignment, trio.current_time()
        self._finish = trio.Event()
        if not request.cut_short:
            with trio.move_on_after(min(self.train_s * (0.8 + 0.4 * self.world.random.random()), request.deadline_s)):
                await self._finish.wait()
        took_s = trio.current_time() - began
        steps = max(1, min(assignment.steps, round(assignment.steps * took_s / (0.8 * self.train_s))))
        self.speed = SCHEDULE.steps(self.config.genesis) / self.train_s
        samples = steps * SCHEDULE.unit
        seed = sum(first * 31 + end for first, end in head_of(assignment.ranges, samples)) + ord(self.peer[0])
        delta = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 1e-2
        return TrainResult(steps, samples, 1.0, delta)

    def finish_early(self) -> None:
        self._finish.set()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Invented gradients follow from no weights."""

    def is_exhausted(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()
