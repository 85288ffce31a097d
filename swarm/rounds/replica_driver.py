"""One replica in its group: the node, its trainer and its weights, connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from peer.bounds import MEMBERS_MAX
from peer.net.host import Host
from swarm.protocol.agreement import events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import WorkPlan
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.gathering import gather_batches
from swarm.rounds.group_driver import DriverOptions, GroupDriver
from swarm.rounds.handlers import SliceHandlers, serve_agreement, serve_heads
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_actor import CommitListener, ReplicaActor
from swarm.rounds.restoring import Restorer, load_states
from swarm.rounds.result_log import ResultLog
from swarm.rounds.trainers.trainer import Trainer
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore


@dataclass(frozen=True)
class ReplicaParts:
    """What a replica is made of. `folder` holds its records, results and partial fetches."""

    host: Host
    state: OuterState
    snapshots: SnapshotStore
    trainer: Trainer
    schedule: RoundSchedule
    timeouts: AdaptiveTimeouts
    folder: Path


class ReplicaDriver:
    """Takes part in a group's agreement with weights and a trainer."""

    def __init__(
        self,
        parts: ReplicaParts,
        config: AgreementConfig,
        work: Work,
        known_peers: Callable[[], Iterable[str]],
        per_prefix: int = MEMBERS_MAX,
    ) -> None:
        """`per_prefix`: members of one address prefix in a head at most."""
        self._parts = parts
        self.log = ResultLog(parts.folder / "results")
        self.fetched = FetchedStates(parts.folder, parts.state.size_bytes, len(parts.state.tensors))
        records = RecordFiles(parts.folder / "agreement")
        options = DriverOptions(per_prefix=per_prefix)
        self.group = GroupDriver(parts.host, config, work, records, parts.timeouts, known_peers, options)
        self.actor: ReplicaActor | None = None

    @property
    def head(self) -> Head:
        """The head whose weights are here."""
        return self.actor.head if self.actor is not None else self.group.head

    @property
    def me(self) -> Member:
        return self.group.me

    @property
    def phase(self) -> str:
        """What this replica does, for people."""
        return "catching up" if self.actor is not None and self.actor.fetching else self.group.phase

    @property
    def takes_part(self) -> bool:
        """Whether this peer is a member of the group or a learner, or the present plan takes it in."""
        head, plan = self.head, self._plan
        learns = any(learner.member == self.me for learner in head.learners)
        return head.has(self.me) or learns or (plan is not None and plan.of(self.me) is not None)

    def pause(self, paused: bool) -> None:
        """As `GroupDriver.pause`."""
        self.group.pause(paused)

    async def until_round(self, number: int) -> None:
        """Wait until the weights of that round, or a later one, are here."""
        assert self.actor is not None
        while self.actor.head.round < number or self.actor.head.state_hash != self._parts.state.tree.root:
            await self.actor.committed.wait(1.0)

    async def begin(self, listener: CommitListener, proof: Sequence[ChainLink] = ()) -> None:
        """Start from what the disk holds. `proof`: of the state there, where it is another peer's backup."""
        parts, group = self._parts, self.group
        events_log = parts.host.events
        found = await load_states(parts.state, self.log, self.fetched, events_log)
        group.begin(found.hashes, proof)
        context = RoundContext(
            group.me, parts.host, parts.state, parts.snapshots, parts.trainer, parts.schedule, parts.timeouts
        )
        round_info = parts.schedule.round_info(group.head)
        coding = await trio.to_thread.run_sync(parts.state.strategy.coding, round_info, parts.state.tensors)
        self.actor = ReplicaActor(context, group.head, coding, listener, self.log, self.fetched, group)
        restorer = Restorer(found, self.actor.builder, self.log, self.fetched, events_log)
        for missing in await restorer.restore(group.head):
            group.feed(events.StateFetched(missing, False))
        await self.actor.recode()
        SliceHandlers(parts.host.rpc, self.actor)
        serve_agreement(parts.host.rpc, lambda: {group.group: group})
        serve_heads(parts.host.rpc, lambda: {group.group: group})

    async def run(self) -> None:
        """Take part until cancelled."""
        assert self.actor is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.actor.run)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(self.group.run, self.actor)
            if self._parts.schedule.synchronous:
                nursery.start_soon(gather_batches, self.group, self._parts.trainer, lambda: self._plan)

    def checkpointed(self, head: Head, base: bytes) -> None:
        """Forget what led to a head of which a checkpoint is on disk; `base`: `fetched.base` when it was begun.
        Blocks."""
        self.log.drop(head.round)
        self.fetched.release(base)

    @property
    def _plan(self) -> WorkPlan | None:
        return self.actor.training.plan if self.actor is not None else None
