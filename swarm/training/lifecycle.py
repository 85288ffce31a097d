"""A peer's way through a run: it takes a seat in a group, publishes what it does there, and moves to another stage when
it is worth more there.

Whoever moves says so at once, by publishing its new stage and when it expects to be at work: no messages, no votes
(`swarm.placement.rebalance`). The last replica of a stage stays. A stage that has lost all of its replicas is taken by
the next decision; until then everybody else says what they wait for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import msgspec
import trio

from peer import faults
from peer.errors import ConfigError, NetworkError
from peer.free_memory import free_memory_bytes
from swarm.membership.completion import MEASURING, check_run_alive, run_is_over, wait_for_others
from swarm.membership.membership import REFRESH_S, LocalStatus, MemberRecord, Membership, member_record
from swarm.pipeline.config import LoadReport
from swarm.pipeline.data_feed import FeederStats, serve_tokens
from swarm.placement.load import PeerLoad
from swarm.placement.rebalance import Move
from swarm.placement.stage_choice import (
    CHOOSING,
    Mover,
    at_work,
    exceeds_move_limit,
    has_other_replica,
    ready_after_s,
    should_return,
    stage_to_take,
    why_none_fits,
)
from swarm.placement.stages import stage_costs
from swarm.protocol.head import Head
from swarm.protocol.quorum import ask_head_reports
from swarm.training.build_trainer import rules_of
from swarm.training.checkpoints import kept_stages, note_replica
from swarm.training.context import PeerContext
from swarm.training.corpus import has_text, open_corpus
from swarm.training.replica import StageReplica, open_replica

SETTLE_S: Final = 1.5  # for what was published to be read by those who choose, too
LATE_S: Final = 5.0  # who is not at work by the time it expected publishes that it takes so much longer
WATCHED_MAX: Final = 64
RESTORE_AGAIN_S: Final = 60.0  # after so long at a seat that nobody takes us at, keepers are asked once more


@dataclass(frozen=True)
class _Place:
    """The stage that this peer chose (-1: none yet), the one it came from, when, and when it expects to be at work,
    Unix time; whether it has been since."""

    stage: int = -1
    source: int = -1
    since: float = 0.0
    ready_at: float = 0.0
    arrived: bool = False


class PeerLifecycle:
    """`run()` takes part until the run is complete."""

    def __init__(self, context: PeerContext) -> None:
        self._context, self._manifest, self._host = context, context.manifest, context.host
        self._costs = stage_costs(context.manifest)
        self._joined_at = time.time()
        self._place = _Place()
        self._replica: StageReplica | None = None
        self._phase = "starting"
        self._missing: tuple[int, ...] = ()
        self._seated_at = 0.0
        self._served = False  # whether our stage has been since we set out for our seat
        self._passed = (0, trio.current_time())  # micro-batches counted at this seat, and when that was looked at
        self._rate = 0.0  # of these, a second
        self._memory_bytes = context.config.memory_bytes or free_memory_bytes()
        self._download_bytes_s = 0.0
        self._has_text = True
        run_id, events = context.manifest.run_id, context.host.events
        self._membership = Membership(context.node, context.host, run_id, self._describe, events)

    async def run(self) -> None:
        """Raises what stands in the way of a seat: ConfigError, ResourceError, WorkerError, CheckpointError; NoQuorum
        where the run is complete and nobody is left who could pass on its last round."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._membership.run)
            if self._context.config.role == "feeder":
                await self._feed()
            else:
                authority, rounds = self._manifest.authority, self._manifest.run.rounds
                nursery.start_soon(check_run_alive, self._others, authority, rounds, self._is_behind)
                await self._choose()
                while await self._stay(self._place.stage):
                    pass
            nursery.cancel_scope.cancel()

    async def _stay(self, stage: int) -> bool:
        """As `_sit`; who has come from another stage and has too little text for the first goes back."""
        try:
            return await self._sit(stage)
        except ConfigError as error:
            if stage > 0 or self._place.source < 0 or self._context.config.stage is not None:
                raise
            self._has_text = False
            self._host.events.emit("text_missing", reason=str(error))
            self._go(self._place.source)
            return True

    async def _sit(self, stage: int) -> bool:
        """Take part in the group of `stage`: until the run is complete, or (true) until another stage needs us more, or
        this one has lost its last replica before we had its state."""
        moves, self._served = False, self._is_served
        async with open_replica(self._context, stage, self._others) as replica:
            self._replica = replica
            self._passed, self._rate = (0, trio.current_time()), 0.0
            if self._manifest.stages > 1:
                note_replica(self._context, stage)
                self._seated_at = trio.current_time()
                self._host.events.emit("replica_opened", stage=stage)
                faults.reach("arriving")
            try:
                async with trio.open_nursery() as nursery:

                    async def watch() -> None:
                        nonlocal moves
                        await self._until_needed_elsewhere()
                        faults.reach("leaving")
                        moves = True
                        replica.tell_unmerged()
                        nursery.cancel_scope.cancel()

                    if self._manifest.stages > 1:
                        nursery.start_soon(watch)
                    await replica.run(
                        partial(wait_for_others, self._membership, self._others, self._manifest.run.rounds)
                    )
                    moves = False
                    nursery.cancel_scope.cancel()
            finally:
                self._replica = None
                self._download_bytes_s = replica.download_bytes_s or self._download_bytes_s
        return moves

    async def _feed(self) -> None:
        """Read text for those who issue micro-batches, until all stages have come to the run's end."""
        corpus = await open_corpus(self._context)
        rules = rules_of(self._manifest)
        fed = FeederStats(rules, self._host.events)
        serve_tokens(self._host.rpc, rules, corpus.read, fed.note)
        self._phase = "feeding"
        try:
            await run_is_over(self._membership, self._others, self._manifest.run.rounds, trains=False)
        finally:
            fed.tell()

    # -- choosing ----------------------------------------------------------------------------------------------------

    async def _choose(self) -> None:
        """Settle on a stage: the only one, the one that the user pinned, or the one that we are worth most in."""
        stages, pinned = self._manifest.stages, self._context.config.stage
        if stages > 1:
            self._has_text = await has_text(self._context)
            if not self._has_text:
                reason = (
                    "this machine has none of the run's text: it takes any stage but the first (--data names a folder)"
                )
                self._host.events.emit("text_missing", reason=reason)
        if stages == 1 or pinned is not None:
            self._go(pinned or 0)
            return
        self._phase = CHOOSING
        kept = kept_stages(self._context)
        await self._membership.announce()
        await trio.sleep(SETTLE_S)
        with suppress(NetworkError):  # what was read by the way is nearly as new
            await self._membership.read()
        stage = stage_to_take(self._load(), self._others(), self._costs, time.time(), kept)
        if stage is None:
            raise ConfigError(why_none_fits(self._load(), self._costs))
        self._go(stage)
        await self._membership.announce()

    def _go(self, stage: int) -> None:
        now, source = time.time(), self._place.stage
        ready_at = now + ready_after_s(self._load(), self._costs[stage])
        self._place = _Place(stage, source, now, ready_at)
        self._phase = "starting"

    def _load(self) -> PeerLoad:
        fetched = self._download_bytes_s or math.inf
        return PeerLoad(
            self._host.peer_id,
            -1,
            0.0,
            download_bytes_s=fetched,
            memory_bytes=self._memory_bytes,
            has_text=self._has_text,
        )

    # -- moving ------------------------------------------------------------------------------------------------------

    async def _until_needed_elsewhere(self) -> None:
        """Watch everybody's load; return once this peer is to move, having said so, or to take its seat anew."""
        mover = Mover(self._host.peer_id, self._costs)
        while True:
            await trio.sleep(REFRESH_S)
            self._note_missing()
            self._watch_next()
            self._tell_load()
            if self._is_orphaned:
                return
            self._served |= self._is_served
            if self._context.config.stage is not None:
                continue
            if self._is_arriving:
                if should_return(self._host.peer_id, self._membership.view, time.time()):
                    await self._turn_back()
                    return
                continue
            move = self._scripted_move() or mover.due(self._membership.view, time.time())
            if move is not None and move.source == self._place.stage and await self._declare(move):
                return

    def _scripted_move(self) -> Move | None:
        """What a test's script asks for."""
        if faults.reach("at_replica") != "move":
            return None
        source = self._place.stage
        return Move(self._host.peer_id, source, (source - 1) % self._manifest.stages, 0.0)

    async def _declare(self, move: Move) -> bool:
        """Publish the move, and see whether it may be: where all of a stage would leave it at once, all stay, and where
        more set out than may be under way, the last ones do."""
        empty, before, me = move.target in self._missing, self._place, self._host.peer_id
        self._go(move.target)
        await self._membership.announce()
        with suppress(NetworkError):
            await self._membership.read()
        served = at_work(move.target, self._membership.view, time.time())
        crowded = bool(served) if empty else exceeds_move_limit(me, self._membership.view, time.time())
        if crowded or not await self._has_other_replica(move.source):
            self._place = before
            await self._membership.announce()
            return False
        reason = "nobody serves it" if empty else "it is the slowest"
        self._host.events.emit(
            "move_started", source=move.source, target=move.target, gain=round(move.gain, 4), reason=reason
        )
        return True

    async def _has_other_replica(self, stage: int) -> bool:
        """Whether another member of our group is at work in `stage`, and answers: anybody may publish that it is."""
        assert self._replica is not None
        head, me = self._replica.engine.head, self._host.peer_id
        others = [member.peer for member in head.members if member.peer != me]
        answers = await ask_head_reports(self._host.rpc, others, group=head.run_id, most=len(others))
        mates = {peer for peer, report in answers if report.member.peer == peer and head.has(report.member)}
        records = {peer: record for peer, record in self._membership.view.items() if peer in mates}
        return has_other_replica(me, stage, records, time.time())

    async def _turn_back(self) -> None:
        """To the stage it came from, whose last commit it has on disk."""
        target, source = self._place.stage, self._place.source
        self._go(source)
        await self._membership.announce()
        self._host.events.emit("move_started", source=target, target=source, gain=0.0, reason="nobody serves it")

    def _note_missing(self) -> None:
        """Say which stages nobody serves: nothing can be trained until somebody does."""
        now, records = time.time(), self._membership.view
        missing = tuple(s for s in range(self._manifest.stages) if not at_work(s, records, now))
        if missing != self._missing:
            self._missing = missing
            self._host.events.emit("stages_missing", stages=[str(stage) for stage in missing])

    def _watch_next(self) -> None:
        """So that calls to a replica of the next stage that dies or freezes are given up at once."""
        following = at_work(self._place.stage + 1, self._others(), time.time())
        self._host.watch(sorted(following)[:WATCHED_MAX], cause="next stage")

    def _tell_load(self) -> None:
        """For who looks on."""
        replica, now = self._replica, trio.current_time()
        if replica is not None:
            passed, since = self._passed
            self._passed = (replica.passed, now)
            self._rate = (replica.passed - passed) / (now - since) if now > since else 0.0
            load = replica.load()
            self._host.events.emit(
                "stage_load",
                queue=load.queue,
                service_s=round(load.service_s, 4),
                rate=round(self._rate, 2),
                phase=self._told_phase,
            )

    # -- what others read --------------------------------------------------------------------------------------------

    def _others(self) -> Mapping[str, MemberRecord]:
        return {peer: record for peer, record in self._membership.view.items() if peer != self._host.peer_id}

    @property
    def _role(self) -> Literal["full", "stage", "feeder"]:
        if self._manifest.stages == 1:
            return "full"
        return "feeder" if self._context.config.role == "feeder" else "stage"

    @property
    def _is_arriving(self) -> bool:
        """Whether this peer is still on its way to its stage: it is no member of the group yet."""
        replica = self._replica
        return self._manifest.stages > 1 and not (replica and replica.stage == self._place.stage and replica.is_member)

    def _is_behind(self) -> bool:
        """Whether we sit at an earlier round than the last."""
        return self._replica is not None and self._replica.engine.head.round < self._manifest.run.rounds

    @property
    def _is_served(self) -> bool:
        """Whether another replica of our stage was there when it last wrote its record, and not just expected to be."""
        serving = at_work(self._place.stage, self._others(), time.time())
        return any(not record.moving(record.at) for record in serving.values())

    @property
    def _is_orphaned(self) -> bool:
        """Whether the last replica was lost while this peer was on its way there, or nobody takes it for one with what
        it has, while others go on from later rounds. Who takes its seat again asks the keepers, which it did not while
        the stage was served, or may not have reached (`swarm.training.restore`)."""
        if not self._is_arriving or self._place.stage not in self._missing:
            return False
        if self._served or self._replica is None:
            return self._served
        rounds = [record.round for record in self._others().values() if record.role == "stage"]
        behind = self._replica.engine.head.round < max(rounds, default=0)
        return behind and trio.current_time() - self._seated_at > RESTORE_AGAIN_S

    def _describe(self) -> MemberRecord:
        place, replica, now = self._place, self._replica, time.time()
        if not self._is_arriving and not place.arrived:
            place = self._place = replace(place, ready_at=min(place.ready_at, now), arrived=True)
            if place.source >= 0:
                self._host.events.emit("move_finished", target=place.stage, seconds=round(now - place.since, 3))
        pipelined = self._manifest.stages > 1
        head = replica.engine.head if replica else self._nowhere
        own = LocalStatus(
            session=replica.session if replica else "",
            name=self._context.config.name,
            role=self._role,
            phase=self._told_phase,
            joined_at=self._joined_at,
            speed=replica.trainer.speed if replica else 0.0,
            loss=replica.trainer.loss if replica else None,
            val_loss=replica.trainer.val_loss if replica else None,
        )
        if pipelined:
            load = replica.load() if replica else LoadReport()
            own = replace(
                own,
                stage=place.stage,
                source=place.source,
                queue=load.queue,
                service_s=load.service_s,
                rate=self._rate if replica else 0.0,
                download_bytes_s=self._download_bytes_s,
                memory_bytes=self._memory_bytes,
                has_text=self._has_text,
                pinned=self._context.config.stage is not None,
                since=place.since,
                ready_at=max(place.ready_at, now + LATE_S) if self._is_arriving else place.ready_at,
            )
        return member_record(self._host, head, own)

    @property
    def _told_phase(self) -> str:
        if self._replica is None:
            return self._phase
        if self._replica.measures_last:
            return MEASURING
        if self._missing and not self._is_arriving:
            return f"waiting for stage {self._missing[0]}"
        return self._replica.engine.phase

    @property
    def _nowhere(self) -> Head:
        """The head of who has no state yet."""
        first = self._manifest.first_head(max(self._place.stage, 0))
        return msgspec.structs.replace(first, round=-1)
