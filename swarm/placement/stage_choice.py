"""Which stage a peer takes, and when it moves to another: from everybody's records, alike for all who read alike.

Pure. Joiners publish that they have not chosen yet, and look again a moment later: those that choose at the same time
see each other and spread out by one rule (`swarm.placement.rebalance.stages_for_joiners`). Moves are
`swarm.placement.rebalance.decide`'s; what is added here is that nobody leaves a stage without another replica that is
at work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from blake3 import blake3
from msgspec.structs import replace

from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import REFRESH_S
from swarm.pipeline.config import LoadReport
from swarm.placement.load import LoadView, PeerLoad, StageCost, fits, move_s
from swarm.placement.rebalance import Move, RebalanceConfig, decide, stages_for_joiners

CHOOSING: Final = "choosing a stage"
TAKE_PLACE_S: Final = 15.0  # to start a worker and be taken in by the group, besides the download


def load_of(peer: str, record: MemberRecord, costs: Sequence[StageCost]) -> PeerLoad:
    """What a record says, in the units of `swarm.placement.rebalance`: work units a second, of what it did last."""
    measured_at = record.source if record.moving(record.at) and record.source >= 0 else record.stage
    known = record.service_s > 0 and 0 <= measured_at < len(costs)
    return PeerLoad(
        peer,
        record.stage,
        costs[measured_at].work / record.service_s if known else 0.0,
        download_bytes_s=record.download_bytes_s or math.inf,
        memory_bytes=record.memory_bytes or math.inf,
        since_s=record.since,
        ready_s=record.ready_at,
        source=record.source if record.source >= 0 else None,
        has_text=record.has_text,
        pinned=record.pinned,
    )


def view_of(now_s: float, records: Mapping[str, MemberRecord], costs: Sequence[StageCost]) -> LoadView:
    """Everybody who has a stage, at the time `now_s` that all agree on."""
    loads = (load_of(peer, record, costs) for peer, record in records.items() if record.role == "stage")
    return LoadView.of(now_s, costs, loads)


def stage_to_take(
    me: PeerLoad, records: Mapping[str, MemberRecord], costs: Sequence[StageCost], now_s: float, kept: Sequence[int]
) -> int | None:
    """The stage of a joiner: the first that nobody holds of those it has `kept` a state of; else where it is worth
    most, among all that are choosing now. None if it can serve none."""
    view = view_of(now_s, records, costs)
    taken = {load.stage for load in view.peers if load.peer != me.peer}
    for stage in kept:
        if stage not in taken and fits(me, costs[stage]):
            return stage
    view = LoadView.of(now_s, costs, (load for load in view.peers if load.peer != me.peer))
    others = {
        peer: load_of(peer, record, costs)
        for peer, record in records.items()
        if record.role == "stage" and record.stage < 0 and record.phase == CHOOSING
    }
    return stages_for_joiners(view, {**others, me.peer: me}.values()).get(me.peer)


def why_none_fits(me: PeerLoad, costs: Sequence[StageCost]) -> str:
    """What a joiner that can serve no stage is told."""
    have, least = me.memory_bytes / 1e9, min(cost.memory_bytes for cost in costs) / 1e9
    if have >= least:
        return (
            f"the stages that fit into {have:.2f} GB read the run's text, and this machine has none of it: name a"
            " folder of it with --data, or free some memory for another stage."
        )
    return (
        f"no stage fits into {have:.2f} GB (the smallest needs {least:.2f} GB): free some memory, or join with"
        " --role feeder."
    )


class Mover:
    """Decides on the moves of `peer`, once a period by the clock of all (Unix time), so that all who read the same
    records decide the same; while a stage is empty, with every reading."""

    def __init__(self, peer: str, costs: Sequence[StageCost], config: RebalanceConfig | None = None) -> None:
        self._peer = peer
        self._costs = costs
        self._config = config or RebalanceConfig()
        self._decided = -1

    def due(self, records: Mapping[str, MemberRecord], now_s: float) -> Move | None:
        """The move that the peer should start now, if any."""
        urgent = 0.0 in view_of(now_s, records, self._costs).throughputs()
        period_s = REFRESH_S if urgent else self._config.period_s(len(records))
        period = math.floor(now_s / period_s)
        if not urgent and period == self._decided:
            return None
        self._decided = period
        rested = {peer: replace(record, pinned=True) for peer, record in records.items() if may_move_now(peer, period)}
        moves = decide(view_of(period * period_s, {**records, **rested}, self._costs), self._config)
        mine = next((move for move in moves if move.peer == self._peer), None)
        return mine if mine is not None and has_other_replica(self._peer, mine.source, records, now_s) else None


def may_move_now(peer: str, period: int) -> bool:
    """Whether nobody counts on `peer` to move in that period, nor waits for it if it is on its way: one in four, by
    lot. So whoever ought to move and does not, or never arrives, as it is broken or hostile, holds up the others for a
    few periods and no longer."""
    return blake3(f"{peer}/{period}".encode()).digest(1)[0] < 64


def has_other_replica(peer: str, stage: int, records: Mapping[str, MemberRecord], now_s: float) -> bool:
    """Whether another replica is at work in that stage."""
    return any(other != peer for other in at_work(stage, records, now_s))


def exceeds_move_limit(
    peer: str, records: Mapping[str, MemberRecord], now_s: float, config: RebalanceConfig | None = None
) -> bool:
    """Whether as many others as may be on their way at once had left for another stage before `peer`: those whose
    readings of the load differed may have set out together. As in `decide`, nobody waits for those that rest, nor for
    those that have been on their way for longer than the horizon."""
    config, mine = config or RebalanceConfig(), records.get(peer)
    if mine is None:
        return False
    period = math.floor(now_s / config.period_s(len(records)))
    earlier = [
        other
        for other, record in records.items()
        if record.role == "stage"
        and record.source >= 0
        and record.moving(now_s)
        and (record.since, other) < (mine.since, peer)
        and now_s - record.since < config.horizon_s
        and not may_move_now(other, period)
    ]
    return len(earlier) >= config.flights(len(records))


def should_return(peer: str, records: Mapping[str, MemberRecord], now_s: float) -> bool:
    """Whether a peer that has left its stage and is not taken in by its new one yet returns: its deputy was lost
    meanwhile, so that nobody serves the old one, while somebody serves the new one. Of several that left, one."""
    mine = records.get(peer)
    if mine is None or mine.source < 0 or mine.source == mine.stage or not mine.moving(now_s):
        return False
    left = [p for p, r in records.items() if r.role == "stage" and r.source == mine.source and r.moving(now_s)]
    coming = any(r.role == "stage" and r.stage == mine.source for r in records.values())
    return peer == min(left) and not coming and bool(at_work(mine.stage, records, now_s))


def at_work(stage: int, records: Mapping[str, MemberRecord], now_s: float) -> dict[str, MemberRecord]:
    """Who serves `stage`: the replicas that have arrived there."""
    return {
        peer: record
        for peer, record in records.items()
        if record.role == "stage" and record.stage == stage and not record.moving(now_s)
    }


def replicas_of(stage: int, records: Mapping[str, MemberRecord], now_s: float) -> dict[str, LoadReport]:
    """The replicas of `stage` that micro-batches may be sent to, and how busy they are."""
    serving = at_work(stage, records, now_s)
    return {peer: LoadReport(record.queue, record.service_s, record.at) for peer, record in serving.items()}


def ready_after_s(me: PeerLoad, target: StageCost) -> float:
    """How long a peer that takes a stage now is expected to be out."""
    return TAKE_PLACE_S + min(move_s(me, target), 3600.0)
