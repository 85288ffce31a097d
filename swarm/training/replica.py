"""A peer's replica of one stage (or of the whole model): its state, the worker that trains it, its part in the group's
agreement, and the folder that all is saved to.

A peer has one replica at a time. Closing it saves the last commit, ends the worker and withdraws what was served; a
move closes one replica and opens another.

    async with open_replica(context, stage, known) as replica:
        await replica.run(stay)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from peer.catalogue.rounds import HeadAdopted, RoundCommitted, RoundEmpty
from peer.catalogue.stages import PipelineLost
from peer.notifier import Notifier
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.pipeline.config import LoadReport
from swarm.pipeline.stage_server import StageServer
from swarm.placement.stages import state_bytes
from swarm.protocol.head import Head
from swarm.protocol.ledger import count
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.protocol.plan import Contribution
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.group_driver import DriverOptions
from swarm.rounds.replica_driver import ReplicaDriver, restore_replica
from swarm.rounds.trainers.upkeep import ReplicaTrainer, ReplicaUpkeep
from swarm.rounds.trainers.worker_trainer import PAUSE_S, WorkerTrainer
from swarm.rounds.work import work_of, work_timeout
from swarm.run.agreement import agreement_config, schedule_of, sponsors_of, stages_before
from swarm.run.manifest import Manifest
from swarm.run.owners_pause import PAUSED, obey
from swarm.run.peer_context import PeerContext
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.training.base_weights import base_store, trained_beside
from swarm.training.build_trainer import build_trainer
from swarm.training.checkpoints import LocalCheckpoint, saved_proof
from swarm.training.restore import restore
from swarm.training.stage_backup import StageBackup

DRAIN_S: Final = 60.0  # a peer stays in the group that it leaves for so long at most
DRAIN_ROUNDS: Final = 2  # and for so many commits
DRAIN_LOOK_S: Final = 0.25
_RANGES_LISTED: Final = 16  # in one text of an event, so that the log does not cut it


@asynccontextmanager
async def open_replica(context: PeerContext, stage: int, known: MemberView) -> AsyncIterator[StageReplica]:
    """Open a replica in the group of `stage`. Raises ConfigError, ResourceError, WorkerError."""
    stages = context.manifest.stages
    with context.host.rpc.scope():
        backup = StageBackup(context, stage, known) if stages > 1 else None
        size_bytes = state_bytes(context.manifest, stage)
        snapshots = SnapshotStore(size_bytes, SLICE_BYTES_MAX, events=context.host.events, slots=context.uploads)
        parts = base_store(context)
        beside = [None if backup is None else backup.snapshots, parts]
        serve_snapshots(context.host.rpc, [snapshots, *(store for store in beside if store is not None)])
        await restore(context, stage, known)  # meanwhile other peers may ask for this one's backup
        base = await trained_beside(context, stage, parts, known)
        checkpoint = await LocalCheckpoint.open(context, stage)
        async with build_trainer(context, stage, checkpoint, known, base) as (trainer, server):
            driver = await _restore_driver(context, stage, checkpoint, trainer, known, snapshots)
            replica = StageReplica(context, checkpoint, trainer, server, known, driver, backup)
            replica.adopt()
            yield replica


async def _restore_driver(
    context: PeerContext,
    stage: int,
    checkpoint: LocalCheckpoint,
    trainer: ReplicaTrainer,
    known: MemberView,
    snapshots: SnapshotStore,
) -> ReplicaDriver:
    """Bring the node and the weights to where the disk leads."""
    manifest, host, state = context.manifest, context.host, checkpoint.state
    schedule, before = schedule_of(manifest, stage), stages_before(manifest, stage, host.peer_id)
    timeouts = AdaptiveTimeouts(manifest.run.timeout_floor_s)
    replica = RoundContext(host, state, snapshots, trainer, schedule, timeouts, checkpoint.home.path)
    config = agreement_config(manifest, stage, host.peer_id, context.gate)
    timeout = work_timeout(schedule, timeouts, lambda: trainer.speed)
    exchange_s = lambda head: timeouts.exchange_s(timeouts.exchange_bytes)  # noqa: E731
    work = work_of(state.strategy, schedule, exchange_s, timeout, before, lambda head: timeouts.update_bytes)
    work = replace(work, sponsors=sponsors_of(manifest))
    proof = await trio.to_thread.run_sync(saved_proof, checkpoint.home)
    options = DriverOptions(per_prefix=manifest.run.members_per_prefix, proof=proof)
    return await restore_replica(replica, config, work, lambda: list(group_of(manifest, stage, known)), options)


def group_of(manifest: Manifest, stage: int, known: MemberView) -> dict[str, MemberRecord]:
    """Return the peers that may know of a group's heads: its other members, joiners, and the authority."""
    whole = manifest.stages == 1
    return {p: r for p, r in known().items() if whole or r.stage == stage or r.role == "coordinator"}


class StageReplica:
    """Applies what the group commits: hands weights to the trainer, reports commits, saves checkpoints.

    Implements `swarm.rounds.replica_actor.CommitListener`.
    """

    def __init__(
        self,
        context: PeerContext,
        checkpoint: LocalCheckpoint,
        trainer: ReplicaTrainer,
        server: StageServer | None,
        known: MemberView,
        driver: ReplicaDriver,
        backup: StageBackup | None,
    ) -> None:
        """`server`: of its stage's micro-batches, in a pipeline."""
        manifest, host = context.manifest, context.host
        self.stage, self.trainer = 0 if server is None else server.stage, trainer
        self._manifest, self._host, self._checkpoint, self._server = manifest, host, checkpoint, server
        self._known, self._backup, self.driver = known, backup, driver
        self._pause = context.pause
        self._state = checkpoint.state
        self._upkeep = ReplicaUpkeep(trainer, self._save, host.events)
        self._round_began = trio.current_time()
        self._adopted = b""
        self._committed = Notifier()
        driver.actor.listener = self

    def adopt(self) -> None:
        """Train from what the disk holds."""
        head, state = self.driver.head, self._state
        here = head if head.state_hash == state.tree.root else self._checkpoint.head
        self.trainer.adopt(state.theta, None, here)
        self._adopted = state.tree.root

    async def run(self, stay: Callable[[], Awaitable[None]]) -> None:
        """Take part until the run is complete, then serve other peers until `stay` returns. The last commit is saved at
        the end, also when cancelled. Raises ResourceError if it is lost, as the disk is full."""
        rounds = self._manifest.run.rounds
        try:
            async with self._upkeep.open(lambda: self.driver.head) as tasks:
                tasks.start_soon(self.trainer.run)
                tasks.start_soon(self.driver.run)
                if isinstance(self.trainer, WorkerTrainer):  # a replica of a stage is closed by `PeerLifecycle`
                    tasks.start_soon(obey, self._pause, self.trainer, self.driver.group.pause)
                if self._backup is not None:
                    tasks.start_soon(self._backup.run)
                if not rounds:
                    await trio.sleep_forever()
                await self.driver.until_round(rounds)
                await self._upkeep.finish(self.driver.head, self._measures(self.driver.head))
                await stay()
        finally:
            with trio.CancelScope(shield=True):
                head = self.driver.head
                await self._checkpoint.save_last(head, lambda: self._is_kept(head), self.driver.log)

    async def _save(self, head: Head) -> None:
        """Write a checkpoint; what led to it is needed no more."""
        base = self.driver.fetched.base
        if await self._checkpoint.save(head):
            await trio.to_thread.run_sync(self.driver.checkpointed, head, base)

    @property
    def head(self) -> Head:
        """The last commit whose weights this replica has."""
        return self.driver.head

    @property
    def phase(self) -> str:
        return PAUSED if self._pause.paused else self.driver.phase

    @property
    def download_bytes_s(self) -> float:
        """Measured; 0 while unknown."""
        return self.driver.actor.catch_up.download_bytes_s

    @property
    def session(self) -> str:
        return self.driver.me.session

    @property
    def is_member(self) -> bool:
        """Whether this peer is a member of the group, so that micro-batches may be sent to it."""
        return self.driver.takes_part

    @property
    def measures_last(self) -> bool:
        """Whether this peer has the run's last commit and has yet to measure by it, which takes all stages."""
        head, rounds = self.driver.head, self._manifest.run.rounds
        of_pipeline = self._manifest.stages > 1 and self.stage == 0
        return of_pipeline and 0 < rounds <= head.round and self._measures(head) and not self._upkeep.finished

    @property
    def passed(self) -> int:
        """Micro-batches counted by this replica."""
        return 0 if self._server is None else self._server.passed

    def load(self) -> LoadReport:
        """How busy this replica is."""
        return LoadReport() if self._server is None else self._server.load()

    async def drain(self) -> None:
        """Before a move, take no more micro-batches, and stay until the group has merged this replica's samples. Stage
        0 dispatches its unmerged samples again, and so does a synchronous round."""
        server, until = self._server, self.head.round + DRAIN_ROUNDS
        if server is None or self.stage == 0 or self._manifest.synchronous:
            return
        server.handlers.drain()
        with trio.move_on_after(DRAIN_S):
            while not server.drained and self.head.round < until:
                await self._committed.wait(DRAIN_LOOK_S)

    async def yield_device(self) -> None:
        """For this machine's owner: end the worker of a stage now, and stay until the group has merged what was
        submitted. Where replicas make inner steps, what is counted makes a smaller contribution if that takes no longer
        than `PAUSE_S`. In a synchronous round the others' replicas count it once more."""
        server, training = self._server, self.driver.actor.training
        if server is None:
            return
        server.handlers.drain()
        if not self._manifest.synchronous:
            self.trainer.finish_early()
            changed = self.driver.group.changed
            await changed.until(lambda: training.plan is None or training.update is not None, PAUSE_S)
        await server.worker_group.suspend()
        await self._committed.until(lambda: training.update is None, DRAIN_S)

    def tell_unmerged(self) -> None:
        """Report the samples that a move to another stage leaves uncounted: those counted since the last commit. The
        first stage dispatches its own samples again, and so does a synchronous round."""
        unmerged = 0 if self._server is None else count(self._server.accounting.counted)
        if self.stage > 0 and not self._manifest.synchronous and unmerged:
            self._host.events.emit(PipelineLost(samples=unmerged, reason="left the stage"))

    # -- CommitListener ----------------------------------------------------------------------------------------------

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        state, host = self._state, self._host
        adopt = partial(self.trainer.adopt, state.theta, self._changed(head, merged is not None), head)
        if self._server is None:
            await trio.to_thread.run_sync(adopt)  # copies all weights, which may lie on a slow disk
        else:
            adopt()
        if merged is not None and not merged:
            host.events.emit(RoundEmpty(round=head.round, members=len(head.members)))
        now, trained = trio.current_time(), self.trainer.trained.of(head.round)
        pipelined = self._manifest.stages > 1
        told = (RoundCommitted if merged is not None else HeadAdopted)(
            round=head.round,
            term=head.term,
            state_hash=head.state_hash.hex(),
            head=head.hash.hex(),
            previous=head.previous.hex(),
            members=len(head.members),
            contributions=len(merged or ()),
            tokens=head.tokens,
            loss=trained.loss,
            steps=trained.steps,
            skipped=trained.skipped,
            overflows=trained.overflows,
            bytes_up=host.bytes_up,
            bytes_down=host.bytes_down,
            seconds=round(now - self._round_began, 3),
            stage=self.stage if pipelined else None,
            counted=_listed(merged or ()) if pipelined else None,
        )
        host.events.emit(told)
        self._round_began = now
        self._committed.notify()
        if not self.driver.actor.fetching:
            self._checkpoint.home.state_part.unlink(missing_ok=True)  # of a fetch that is no longer needed
        self._upkeep.committed(head, self._measures(head))

    def donors(self, head: Head) -> Iterable[str]:
        """Return the peers that have published that state; the coordinator has the first, and the last in the end."""
        first = [self._manifest.authority] if head.round in (0, self._manifest.run.rounds) else []
        return first + [peer for peer, record in self._group().items() if record.state_hash == head.state_hash]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_kept(self, head: Head) -> bool:
        """Whether another peer with that state stays until it has saved it: of all that have it the one with the least
        id, so that peers that cannot save it do not leave it to each other."""
        others = self._group().items()
        return any(record.state_hash == head.state_hash and peer < self._host.peer_id for peer, record in others)

    def _group(self) -> dict[str, MemberRecord]:
        return group_of(self._manifest, self.stage, self._known)

    def _changed(self, head: Head, by_commit: bool) -> tuple[slice, ...] | None:
        """Return where the weights changed on the way to `head`; None if the state was fetched or replayed."""
        if head.state_hash == self._adopted:
            return ()
        self._adopted = head.state_hash
        return self._state.changed if by_commit else None

    def _measures(self, head: Head) -> bool:
        """Whether this peer measures the held-out loss, for the whole group."""
        return bool(head.members) and head.members[0] == self.driver.me


def _listed(merged: Sequence[Contribution]) -> tuple[str, ...]:
    """Return the samples of all contributions as "first-end,...", in pieces that an event does not cut."""
    return tuple(
        ",".join(f"{first}-{end}" for first, end in ranges[at : at + _RANGES_LISTED])
        for ranges in (body.counted for body in merged)
        for at in range(0, len(ranges), _RANGES_LISTED)
    )
