"""A peer's seat in one group: the state of a stage (or of the whole model), the worker that trains it, the engine that
agrees on it with the others, and the folder that keeps it.

A peer sits in one group at a time. Leaving saves the last commit, closes the worker and withdraws what was served; a
move is to leave one seat and to take another.

    async with open_seat(ground, stage, known) as seat:
        await seat.run()
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import trio

from swarm.membership.membership import MemberRecord, MemberView
from swarm.pipeline.config import LoadReport
from swarm.placement.stages import state_bytes
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import count
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import ROUNDS_MAX, replay
from swarm.state.fetch import fetch_state
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.training.build_trainer import Fitting, fitted, schedule_of
from swarm.training.checkpoints import LocalCheckpoint
from swarm.training.context import PeerContext
from swarm.training.restore import restore
from swarm.training.stage_backup import StageBackup

CHECKPOINT_EVERY_S: Final = 10.0


@asynccontextmanager
async def open_replica(context: PeerContext, stage: int, known: MemberView) -> AsyncIterator[StageReplica]:
    """A seat in the group of `stage`. Raises what stands in its way: ConfigError, ResourceError, WorkerError."""
    stages = context.manifest.stages
    with context.host.rpc.scope():
        backup = StageBackup(context, stage, known) if stages > 1 else None
        snapshots = SnapshotStore(state_bytes(context.manifest, stage), SLICE_BYTES_MAX)
        serve_snapshots(context.host.rpc, [snapshots] if backup is None else [snapshots, backup.backups])
        await restore(context, stage, known)  # meanwhile others may ask us for what we keep
        kept = await LocalCheckpoint.open(context, stage)
        async with fitted(context, stage, kept, known) as fitting:
            yield StageReplica(context, stage, kept, fitting, known, snapshots, backup)


class StageReplica:
    """Keeps what the engine commits: shelf, checkpoints, the trainer's weights. Implements the engine's `Keeper`."""

    def __init__(
        self,
        context: PeerContext,
        stage: int,
        kept: LocalCheckpoint,
        fitting: Fitting,
        known: MemberView,
        snapshots: SnapshotStore,
        backup: StageBackup | None,
    ) -> None:
        manifest, host = context.manifest, context.host
        trainer, self._server = fitting
        self.stage, self.trainer = stage, trainer
        self._manifest, self._kept, self._known, self._backup = manifest, kept, known, backup
        self.download_bytes_s = 0.0  # measured; 0 while unknown
        self._saved_at = self._round_began = trio.current_time()
        self._adopted = kept.head.state_hash
        self._tasks: trio.Nursery | None = None
        self._finished = False
        trainer.adopt(kept.state.theta, None, kept.head)
        me = Member(host.peer_id, secrets.token_hex(8))
        snapshots.publish(kept.state.tree, kept.state.tensors, msgspec.msgpack.encode(kept.head))
        schedule = schedule_of(manifest, stage)
        timeouts = AdaptiveTimeouts(manifest.run.timeout_floor_s)
        self._round_context = RoundContext(
            me, host.identity, host, kept.state, snapshots, trainer, schedule, timeouts, host.events
        )
        rules = manifest.run
        facts = RunLimits(manifest.first_head(stage), manifest.authority, rules.rounds, rules.max_peers)
        self.engine = Engine(self._round_context, facts, kept.head, kept.load_regroup(), self)

    async def run(self, stay: Callable[[], Awaitable[None]]) -> None:
        """Take part until the run is complete, and then serve others until `stay` returns; leave the last commit on
        disk, also when cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                nursery.start_soon(self.trainer.run)
                if self._backup is not None:
                    nursery.start_soon(self._backup.run)
                await self.engine.run()
                await self._finish()
                await stay()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._kept.save(self.engine.head)

    @property
    def session(self) -> str:
        return self._round_context.me.session

    @property
    def is_member(self) -> bool:
        """Whether the group counts on this peer, so that micro-batches may be sent to it."""
        return self.engine.takes_part

    @property
    def measures_last(self) -> bool:
        """Whether this peer has the run's last commit and has yet to measure by it, which takes all stages."""
        head, rounds = self.engine.head, self._manifest.run.rounds
        of_pipeline = self._server is not None and self.stage == 0
        return of_pipeline and 0 < rounds <= head.round and self._measures(head) and not self._finished

    @property
    def passed(self) -> int:
        """Micro-batches counted by this replica."""
        return self._server.passed if self._server is not None else 0

    def load(self) -> LoadReport:
        """How busy this replica of a stage is."""
        return self._server.load() if self._server is not None else LoadReport()

    def tell_unmerged(self) -> None:
        """This peer leaves for another stage. What it has counted since the last commit goes with it: the first stage
        issues its own again, and so does a synchronous round."""
        if self._server is not None and self.stage > 0 and not self._manifest.synchronous:
            counted = count(self._server.accounting.counted)
            if counted:
                self._round_context.events.emit("pipeline_lost", samples=counted, reason="left the stage")

    # -- Keeper ------------------------------------------------------------------------------------------------------

    def known_peers(self) -> list[str]:
        return list(self._group())

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        round_context = self._round_context
        encoded = msgspec.msgpack.encode(head)
        await trio.to_thread.run_sync(
            round_context.snapshots.publish, round_context.state.tree, round_context.state.tensors, encoded, results
        )
        self.trainer.adopt(round_context.state.theta, self._changed(head, bool(results)), head)
        self.trainer.validate_round = head.round if self._measures(head) else None
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
        self._kept.save_regroup(self.engine.regroup)
        self._kept.home.state_part.unlink(missing_ok=True)  # of a fetch that has become needless
        if now - self._saved_at >= CHECKPOINT_EVERY_S and self._tasks is not None:
            self._saved_at = now
            self._tasks.start_soon(self._kept.save, head)

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        """Catch up by replaying the last results if we missed only those, else by fetching the whole state."""
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
                self._kept.home.state_part,
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
        """What an event says besides of a pipeline's commit: the samples of each contribution, as "first-end,..."."""
        if self._server is None:
            return {}
        counted = self.engine.counted if merged else ()
        return {
            "stage": self.stage,
            "counted": [",".join(f"{first}-{end}" for first, end in ranges) for ranges in counted],
        }

    def _group(self) -> dict[str, MemberRecord]:
        """Who may know of the group's heads: its other members, joiners, and the authority."""
        whole = self._manifest.stages == 1
        return {p: r for p, r in self._known().items() if whole or r.stage == self.stage or r.role == "coordinator"}

    def _changed(self, head: Head, by_commit: bool) -> tuple[slice, ...] | None:
        """Where the weights changed on the way to `head`; None if the state was fetched, or replayed."""
        if head.state_hash == self._adopted:
            return ()
        self._adopted = head.state_hash
        return self._round_context.state.changed if by_commit else None

    def _donors(self, candidate: HeadCandidate) -> list[str]:
        """Who was seen at that head, and whoever has published it since."""
        published = [peer for peer, record in self._group().items() if record.head == candidate.head.hash]
        return list(dict.fromkeys([*candidate.holders, *published]))

    def _measures(self, head: Head) -> bool:
        """One peer measures for all."""
        return bool(head.members) and head.members[0] == self._round_context.me

    async def _finish(self) -> None:
        head = self.engine.head
        if self._measures(head):
            self.trainer.validate_round = head.round
            await self.trainer.validate()
        self._finished = True
        self._round_context.events.emit("run_finished", round=head.round, state_hash=head.state_hash.hex())
