"""A peer's replica of one stage (or of the whole model): its state, the worker that trains it, the engine that agrees
on it with the other members, and the folder that it is saved to.

A peer has one replica at a time. Closing it saves the last commit, ends the worker and withdraws what was served; a
move closes one replica and opens another.

    async with open_replica(context, stage, known) as replica:
        await replica.run(stay)
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import trio

from swarm.membership.member_record import MemberRecord, MemberView
from swarm.pipeline.config import LoadReport
from swarm.placement.stages import state_bytes
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import ROUNDS_MAX, replay
from swarm.rounds.upkeep import ReplicaUpkeep
from swarm.run.peer_context import PeerContext
from swarm.state.fetch import fetch_state
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.training.build_trainer import BuiltTrainer, build_trainer, schedule_of
from swarm.training.checkpoints import LocalCheckpoint
from swarm.training.restore import restore
from swarm.training.stage_backup import StageBackup

_RANGES_LISTED: Final = 16  # in one text of an event, so that the log does not cut it


@asynccontextmanager
async def open_replica(context: PeerContext, stage: int, known: MemberView) -> AsyncIterator[StageReplica]:
    """Open a replica in the group of `stage`. Raises ConfigError, ResourceError, WorkerError."""
    stages = context.manifest.stages
    with context.host.rpc.scope():
        backup = StageBackup(context, stage, known) if stages > 1 else None
        snapshots = SnapshotStore(state_bytes(context.manifest, stage), SLICE_BYTES_MAX)
        serve_snapshots(context.host.rpc, [snapshots] if backup is None else [snapshots, backup.snapshots])
        await restore(context, stage, known)  # meanwhile other peers may ask for this one's backup
        checkpoint = await LocalCheckpoint.open(context, stage)
        async with build_trainer(context, stage, checkpoint, known) as built:
            yield StageReplica(context, stage, checkpoint, built, known, snapshots, backup)


class StageReplica:
    """Applies what the engine commits: publishes snapshots, hands weights to the trainer, saves checkpoints.

    Implements `swarm.rounds.engine.CommitListener`.
    """

    def __init__(
        self,
        context: PeerContext,
        stage: int,
        checkpoint: LocalCheckpoint,
        built: BuiltTrainer,
        known: MemberView,
        snapshots: SnapshotStore,
        backup: StageBackup | None,
    ) -> None:
        manifest, host = context.manifest, context.host
        self.stage, self.trainer = stage, built.trainer
        self.download_bytes_s = 0.0
        """Measured; 0 while unknown."""
        self._manifest, self._checkpoint, self._built = manifest, checkpoint, built
        self._known, self._backup = known, backup
        self._upkeep = ReplicaUpkeep(built.trainer, checkpoint.save, host.events)
        self._round_began = trio.current_time()
        self._adopted = checkpoint.head.state_hash
        built.trainer.adopt(checkpoint.state.theta, None, checkpoint.head)
        me = Member(host.peer_id, secrets.token_hex(8))
        snapshots.publish(checkpoint.state.tree, checkpoint.state.tensors, msgspec.msgpack.encode(checkpoint.head))
        schedule = schedule_of(manifest, stage)
        timeouts = AdaptiveTimeouts(manifest.run.timeout_floor_s)
        self._round_context = RoundContext(me, host, checkpoint.state, snapshots, built.trainer, schedule, timeouts)
        rules = manifest.run
        first, per_prefix = manifest.first_head(stage), rules.prefix_cap
        limits = RunLimits(first, manifest.authority, rules.rounds, rules.max_peers, per_prefix)
        self.engine = Engine(self._round_context, limits, checkpoint.head, checkpoint.load_regroup(), self)

    async def run(self, stay: Callable[[], Awaitable[None]]) -> None:
        """Take part until the run is complete, then serve other peers until `stay` returns. The last commit is saved at
        the end, also when cancelled."""
        async with self._upkeep.open(lambda: self.engine.head) as tasks:
            tasks.start_soon(self.trainer.run)
            if self._backup is not None:
                tasks.start_soon(self._backup.run)
            await self.engine.run()
            await self._upkeep.finish(self.engine.head, self._measures(self.engine.head))
            await stay()

    @property
    def session(self) -> str:
        return self._round_context.me.session

    @property
    def is_member(self) -> bool:
        """Whether this peer is a member of the group, so that micro-batches may be sent to it."""
        return self.engine.takes_part

    @property
    def measures_last(self) -> bool:
        """Whether this peer has the run's last commit and has yet to measure by it, which takes all stages."""
        head, rounds = self.engine.head, self._manifest.run.rounds
        of_pipeline = self._manifest.stages > 1 and self.stage == 0
        return of_pipeline and 0 < rounds <= head.round and self._measures(head) and not self._upkeep.finished

    @property
    def passed(self) -> int:
        """Micro-batches counted by this replica."""
        return self._built.passed

    def load(self) -> LoadReport:
        """How busy this replica is."""
        return self._built.load()

    def tell_unmerged(self) -> None:
        """Tell what this peer leaves uncounted as it moves to another stage: what it has counted since the last commit.
        The first stage dispatches its own samples again, and so does a synchronous round."""
        if self.stage > 0 and not self._manifest.synchronous and self._built.unmerged:
            self._round_context.events.emit("pipeline_lost", samples=self._built.unmerged, reason="left the stage")

    # -- CommitListener ----------------------------------------------------------------------------------------------

    def known_peers(self) -> list[str]:
        return list(self._group())

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        round_context = self._round_context
        encoded = msgspec.msgpack.encode(head)
        await trio.to_thread.run_sync(
            round_context.snapshots.publish, round_context.state.tree, round_context.state.tensors, encoded, results
        )
        self.trainer.adopt(round_context.state.theta, self._changed(head, bool(results)), head)
        now = trio.current_time()
        round_context.events.emit(
            "round_committed" if results else "head_adopted",
            round=head.round,
            term=head.term,
            state_hash=head.state_hash.hex(),
            head=head.hash.hex(),
            previous=head.previous.hex(),
            members=len(head.members),
            tokens=head.tokens,
            loss=self.trainer.loss,
            bytes_up=round_context.host.bytes_up,
            bytes_down=round_context.host.bytes_down,
            seconds=round(now - self._round_began, 3),
            **self._of_stage(bool(results)),
        )
        self._round_began = now
        self._checkpoint.save_regroup(self.engine.regroup)
        self._checkpoint.home.state_part.unlink(missing_ok=True)  # of a fetch that is no longer needed
        self._upkeep.committed(head, self._measures(head))

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        """Catch up: replay the last results if this peer missed only those, else fetch the whole state."""
        round_context, head = self._round_context, candidate.head
        donors = list(candidate.holders)
        began = trio.current_time()
        near = mine.round >= 0 and head.round - mine.round <= ROUNDS_MAX
        replayed = near and await replay(round_context, mine, head.state_hash, donors)
        if not replayed:
            fetched = await fetch_state(
                round_context.host.rpc,
                lambda: self._donors(candidate),
                head.state_hash,
                round_context.state.size_bytes,
                self._checkpoint.home.state_part,
                round_context.events,
                len(round_context.state.tensors),
            )
            donors = list(fetched.donors)
            if fetched.seconds > 0:
                self.download_bytes_s = sum(fetched.donors.values()) / fetched.seconds
            round_context.state.replace(fetched.tensors, fetched.tree)
        round_context.events.emit(
            "state_fetched",
            round=head.round,
            donors=len(donors),
            replayed=replayed,
            seconds=round(trio.current_time() - began, 3),
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _of_stage(self, merged: bool) -> dict[str, int | list[str]]:
        """Return a pipeline's fields of a commit's event: the samples of all contributions as "first-end,..."."""
        if self._manifest.stages == 1:
            return {}
        counted = self.engine.counted if merged else ()
        return {
            "stage": self.stage,
            "counted": [
                ",".join(f"{first}-{end}" for first, end in ranges[at : at + _RANGES_LISTED])
                for ranges in counted
                for at in range(0, len(ranges), _RANGES_LISTED)
            ],
        }

    def _group(self) -> dict[str, MemberRecord]:
        """Return the peers that may know of the group's heads: its other members, joiners, and the authority."""
        whole = self._manifest.stages == 1
        return {p: r for p, r in self._known().items() if whole or r.stage == self.stage or r.role == "coordinator"}

    def _changed(self, head: Head, by_commit: bool) -> tuple[slice, ...] | None:
        """Return where the weights changed on the way to `head`; None if the state was fetched or replayed."""
        if head.state_hash == self._adopted:
            return ()
        self._adopted = head.state_hash
        return self._round_context.state.changed if by_commit else None

    def _donors(self, candidate: HeadCandidate) -> list[str]:
        """Return the peers that reported that head, and those that have published it since."""
        published = [peer for peer, record in self._group().items() if record.head == candidate.head.hash]
        return list(dict.fromkeys([*candidate.holders, *published]))

    def _measures(self, head: Head) -> bool:
        """Whether this peer measures the held-out loss, for the whole group."""
        return bool(head.members) and head.members[0] == self._round_context.me
