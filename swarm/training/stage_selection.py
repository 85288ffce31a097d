"""Selection of this peer's stage, the time of a move to another one, and what the peer publishes about that.

A peer that moves publishes its new stage and when it expects to be at work there: no messages, no votes
(`swarm.placement.rebalance`). The last replica of a stage stays. A stage that has lost all of its replicas is taken by
the next decision; until then the other peers publish which stage they wait for.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import trio

from peer import faults
from peer.catalogue.machine import TextMissing
from peer.catalogue.stages import MoveFinished, MoveStarted, ReplicaOpened, StageLoad, StagesMissing
from peer.errors import ConfigError, NetworkError
from swarm.membership.completion import MEASURING, stages_over
from swarm.membership.member_record import MEMBERS, MemberRecord, MemberRole, measured_record, member_record
from swarm.membership.membership import REFRESH_S, Membership
from swarm.membership.proven_heads import ask_proven_heads
from swarm.pipeline.config import LoadReport
from swarm.placement.costs import stage_costs
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
from swarm.protocol.head import Head
from swarm.run.agreement import agreement_config
from swarm.run.owners_pause import PAUSED
from swarm.run.peer_context import PeerContext
from swarm.training.checkpoints import last_stage, note_stage, saved_stages
from swarm.training.corpus import has_text
from swarm.training.join_checks import room_for_stages
from swarm.training.replica import StageReplica

SETTLE_S: Final = 1.5  # other choosing peers need this long to read what this one has published
LATE_S: Final = 5.0  # a peer that is not at work by the time it expected publishes this much more
WATCHED_MAX: Final = 64
RESTORE_AGAIN_S: Final = 60.0  # after so long outside the group, backup holders are asked once more
RESTORE_FIRST_S: Final = 10.0  # the same where none has brought a state yet: no coordinator goes on from the first one


@dataclass(frozen=True)
class _Place:
    """The stage that this peer has chosen. Times are Unix time."""

    stage: int = -1
    """-1: none yet."""
    source: int = -1
    """The stage that the peer came from; -1: none."""
    since: float = 0.0
    ready_at: float = 0.0
    """When the peer expects to be at work."""
    arrived: bool = False
    """Whether it has been at work since."""


class StageSelection:
    """Chooses this peer's stage, watches the load of all stages, decides on moves, and describes this peer."""

    def __init__(self, context: PeerContext) -> None:
        self._context, self._manifest, self._host = context, context.manifest, context.host
        self.membership = Membership(context.node, context.host, MEMBERS, context.manifest.run_id, self._describe)
        self.phase = "starting"
        """The phase that this peer publishes while it has no replica."""
        self.resting = False
        """Whether it has no part in its stage of a pipeline, as its owner has paused it."""
        self._costs = stage_costs(context.manifest)
        self._joined_at = time.time()
        self._place = _Place()
        self._replica: StageReplica | None = None
        self._opened_at = 0.0
        self._missing: tuple[int, ...] = ()
        self._finished = set[int]()  # stages whose last commit a record has told of
        self._was_served = False  # by another replica, since this peer set out for its stage
        self._passed = (0, trio.current_time())  # micro-batches counted by this replica, and when they were looked at
        self._rate = 0.0  # of these, a second
        self._memory_bytes = room_for_stages(context.config, context.manifest)
        self._download_bytes_s = 0.0
        self._has_text = True

    @property
    def stage(self) -> int:
        return self._place.stage

    @property
    def is_behind(self) -> bool:
        """Whether this peer has a replica that has yet to reach the run's last round."""
        return self._replica is not None and self._replica.head.round < self._manifest.run.rounds

    async def cancel_once_urgent(self, waiting: trio.CancelScope) -> None:
        """Cancel `waiting` once no peer serves the stage that this one has set out for: nothing is merged then."""
        while self._place.stage not in self._missing:
            await trio.sleep(REFRESH_S)
            self._note_missing()
        waiting.cancel()

    # -- told by the lifecycle ---------------------------------------------------------------------------------------

    def opening(self) -> None:
        """Note that a replica of `stage` is about to be opened."""
        self._was_served = self._is_served

    def opened(self, replica: StageReplica) -> None:
        self._replica, self._passed, self._rate = replica, (0, trio.current_time()), 0.0
        if self._manifest.stages > 1:
            note_stage(self._context, replica.stage)
            self._opened_at = trio.current_time()
            self._host.events.emit(ReplicaOpened(stage=replica.stage))
            faults.reach("arriving")

    def wake(self) -> None:
        """Set out for this peer's stage again, if it has one, after its owner's pause."""
        self.resting = False
        if self._place.stage >= 0:
            self.go(self._place.stage)

    def closed(self, replica: StageReplica) -> None:
        self._replica = None
        self._download_bytes_s = replica.download_bytes_s or self._download_bytes_s

    def may_return_without_text(self) -> bool:
        """Whether this peer came to the first stage from another one, by its own choice."""
        return self._place.stage == 0 and self._place.source >= 0 and self._context.config.stage is None

    def return_without_text(self, reason: str) -> None:
        """Go back to the stage that this peer came from: the first stage needs more text than this machine has."""
        self._has_text = False
        self._host.events.emit(TextMissing(reason=reason))
        self.go(self._place.source)

    # -- choosing ----------------------------------------------------------------------------------------------------

    async def choose(self) -> None:
        """Settle on a stage: the only one, the user's, or the one where this peer is worth most. ConfigError if this
        machine can serve none."""
        stages, pinned = self._manifest.stages, self._context.config.stage
        if stages > 1:
            self._has_text = await has_text(self._context)
            if not self._has_text:
                reason = (
                    "this machine has none of the run's text: it takes any stage but the first (--data names a folder)"
                )
                self._host.events.emit(TextMissing(reason=reason))
        if stages == 1 or pinned is not None:
            self.go(pinned or 0)
            return
        self.phase = CHOOSING
        saved, last = saved_stages(self._context), last_stage(self._context)
        await self.membership.announce()
        await trio.sleep(SETTLE_S)
        with suppress(NetworkError):  # the view of the last regular reading is nearly as new
            await self.membership.read()
        stage = stage_to_take(self._load(), self.membership.others(), self._costs, time.time(), saved, last)
        if stage is None:
            raise ConfigError(why_none_fits(self._load(), self._costs))
        self.go(stage)
        await self.membership.announce()

    def go(self, stage: int) -> None:
        """Set out for `stage`; the lifecycle opens a replica there."""
        now, source = time.time(), self._place.stage
        ready_at = now + ready_after_s(self._load(), self._costs[stage])
        self._place = _Place(stage, source, now, ready_at)
        self.phase = "starting"

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

    async def until_needed_elsewhere(self) -> None:
        """Return when this peer is to open another replica: of another stage, which is published by then, or of the
        same stage again."""
        mover = Mover(self._host.peer_id, self._costs)
        while True:
            await trio.sleep(REFRESH_S)
            self._note_missing()
            self._watch_next()
            self._tell_load()
            if self._is_over:
                continue
            if self._is_orphaned:
                return
            self._was_served |= self._is_served
            if self._context.config.stage is not None:
                continue
            if self._is_arriving:
                if should_return(self._host.peer_id, self.membership.view, time.time()):
                    await self._return_to_source()
                    return
                continue
            move = self._scripted_move() or mover.due(self.membership.view, time.time())
            if move is not None and move.source == self._place.stage and await self._declare(move):
                return

    def _scripted_move(self) -> Move | None:
        """The move that a test's script asks for."""
        if faults.reach("at_replica") != "move":
            return None
        source = self._place.stage
        return Move(self._host.peer_id, source, (source - 1) % self._manifest.stages, 0.0)

    async def _declare(self, move: Move) -> bool:
        """Publish the move; withdraw it (false) where all of a stage would leave at once, or more peers set out than
        may be under way. Of several peers the last to set out withdraw."""
        empty, before, me = move.target in self._missing, self._place, self._host.peer_id
        self.go(move.target)
        await self.membership.announce()
        with suppress(NetworkError):
            await self.membership.read()
        served = at_work(move.target, self.membership.view, time.time())
        crowded = bool(served) if empty else exceeds_move_limit(me, self.membership.view, time.time())
        if crowded or not await self._has_other_replica(move.source):
            self._place = before
            await self.membership.announce()
            return False
        reason, gain = "no peer serves it" if empty else "it is the slowest", round(move.gain, 4)
        self._host.events.emit(MoveStarted(source=move.source, target=move.target, gain=gain, reason=reason))
        return True

    async def _has_other_replica(self, stage: int) -> bool:
        """Whether another member of this group is at work in `stage` and answers. Records alone prove nothing: any peer
        may publish that it is."""
        assert self._replica is not None
        head, me = self._replica.head, self._host.peer_id
        others = [member.peer for member in head.members if member.peer != me]
        config = agreement_config(self._manifest, stage, me)
        found = await ask_proven_heads(self._host, config, others, most=len(others))
        mates = {member.peer for proven in found for member in proven.near if head.has(member)}
        records = {peer: record for peer, record in self.membership.view.items() if peer in mates}
        return has_other_replica(me, stage, records, time.time())

    async def _return_to_source(self) -> None:
        """Go back to the stage that this peer came from, whose last commit is on its disk."""
        target, source = self._place.stage, self._place.source
        self.go(source)
        await self.membership.announce()
        self._host.events.emit(MoveStarted(source=target, target=source, gain=0.0, reason="no peer serves it"))

    def _note_missing(self) -> None:
        """Report which stages no peer serves: training waits for them, unless they have left with their last commit,
        which the coordinator may receive a moment later."""
        now, records = time.time(), self.membership.view
        self._finished |= {record.stage for record in records.values() if self._has_last_round(record)}
        needed = () if self._is_over or self._all_have_ended() else range(self._manifest.stages)
        missing = tuple(stage for stage in needed if not at_work(stage, records, now))
        if missing != self._missing:
            self._missing = missing
            self._host.events.emit(StagesMissing(stages=tuple(map(str, missing))))

    def _has_last_round(self, record: MemberRecord) -> bool:
        return record.role == "stage" and 0 < self._manifest.run.rounds <= record.round

    @property
    def _is_over(self) -> bool:
        """Whether all stages have made the run's last commit: then peers leave, and none is needed elsewhere. The
        coordinator says so. While it is away, the last word of the stages counts where this one has its last commit."""
        rounds, authority, records = self._manifest.run.rounds, self._manifest.authority, self.membership.view
        if authority in records:
            return stages_over(records, authority, rounds)
        return self._all_have_ended()

    def _all_have_ended(self) -> bool:
        """Whether this peer has its stage's last commit, and records have reported those of all others."""
        done = self._replica is not None and 0 < self._manifest.run.rounds <= self._replica.head.round
        return done and self._finished | {self._place.stage} >= set(range(self._manifest.stages))

    def _watch_next(self) -> None:
        """Watch the replicas of the next stage, so that calls to one that dies or freezes fail at once."""
        following = at_work(self._place.stage + 1, self.membership.others(), time.time())
        self._host.watch(sorted(following)[:WATCHED_MAX], cause="next stage")

    def _tell_load(self) -> None:
        replica, now = self._replica, trio.current_time()
        if replica is not None:
            passed, since = self._passed
            self._passed = (replica.passed, now)
            self._rate = (replica.passed - passed) / (now - since) if now > since else 0.0
            load = replica.load()
            rate, service_s = round(self._rate, 2), round(load.service_s, 4)
            told = StageLoad(queue=load.queue, service_s=service_s, rate=rate, phase=self._told_phase)
            self._host.events.emit(told)

    @property
    def _is_arriving(self) -> bool:
        """Whether this peer is on its way to its stage: it is no member of the group yet."""
        replica = self._replica
        return self._manifest.stages > 1 and not (replica and replica.stage == self._place.stage and replica.is_member)

    @property
    def _is_served(self) -> bool:
        """Whether another replica of this stage was at work when it last wrote its record, not just expected to be."""
        serving = at_work(self._place.stage, self.membership.others(), time.time())
        return any(not record.moving(record.at) for record in serving.values())

    @property
    def _is_orphaned(self) -> bool:
        """Whether this peer must open its replica again, to ask the backup holders (`swarm.training.restore`).

        Either the stage was served when the peer set out, and the last replica was lost before the peer had its state.
        Or the group does not admit the peer with its state, while other stages continue from later rounds.
        """
        if not self._is_arriving or self._place.stage not in self._missing:
            return False
        if self._was_served or self._replica is None:
            return self._was_served
        rounds = [record.round for record in self.membership.others().values() if record.role == "stage"]
        mine = self._replica.head.round
        again_s = RESTORE_AGAIN_S if mine > 0 else RESTORE_FIRST_S
        return mine < max(rounds, default=0) and trio.current_time() - self._opened_at > again_s

    # -- what others read --------------------------------------------------------------------------------------------

    def _describe(self) -> MemberRecord:
        place, replica, now = self._place, self._replica, time.time()
        if not self._is_arriving and not place.arrived:
            place = self._place = replace(place, ready_at=min(place.ready_at, now), arrived=True)
            if place.source >= 0:
                self._host.events.emit(MoveFinished(target=place.stage, seconds=round(now - place.since, 3)))
        record = member_record(
            self._host,
            replica.head if replica else self._no_state,
            session=replica.session if replica else "",
            name=self._context.config.name,
            role=self._role,
            phase=self._told_phase,
            joined_at=self._joined_at,
        )
        record = msgspec.structs.replace(record, credential=self._context.gate.chain)
        if replica is not None:
            record = measured_record(record, replica.trainer)
        return record if self._manifest.stages == 1 else self._with_stage(record, now)

    def _with_stage(self, record: MemberRecord, now: float) -> MemberRecord:
        place, replica = self._place, self._replica
        load = replica.load() if replica else LoadReport()
        return msgspec.structs.replace(
            record,
            stage=-1 if self.resting else place.stage,
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

    @property
    def _role(self) -> MemberRole:
        if self._manifest.stages == 1:
            return "full"
        return "feeder" if self._context.config.role == "feeder" else "stage"

    @property
    def _told_phase(self) -> str:
        if self.resting or self._replica is None:
            return PAUSED if self.resting else self.phase
        if self._replica.measures_last:
            return MEASURING
        if self._missing and not self._is_arriving:
            return f"waiting for stage {self._missing[0]}"
        return self._replica.phase

    @property
    def _no_state(self) -> Head:
        """The head that a peer without a state publishes: round -1."""
        first = self._manifest.first_head(max(self._place.stage, 0))
        return msgspec.structs.replace(first, round=-1)
