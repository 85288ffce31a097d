"""The choice of a peer's stage, and of its moves to another: from all records, the same for all peers with the same
records.

Pure. Joiners publish that they have not chosen yet, and look again a moment later. So those that choose at the same
time see each other and spread out by one rule (`swarm.placement.rebalance.stages_for_joiners`). Moves are decided by
`swarm.placement.rebalance.decide`; here is added that no peer leaves a stage without another replica at work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from blake3 import blake3
from msgspec.structs import replace

from swarm.membership.member_record import MemberRecord
from swarm.membership.membership import REFRESH_S
from swarm.pipeline.config import LoadReport
from swarm.placement.load import LoadView, PeerLoad, StageCost, fits, move_s
from swarm.placement.rebalance import Move, RebalanceConfig, decide, stages_for_joiners

CHOOSING: Final = "choosing a stage"
START_S: Final = 15.0  # to start a worker and join the group, besides the download


def load_of(peer: str, record: MemberRecord, costs: Sequence[StageCost]) -> PeerLoad:
    """Return a record in the units of `swarm.placement.rebalance`: work units a second, measured at its last stage."""
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
    """Return the view of all peers with a stage, at the time `now_s` that all agree on."""
    loads = (load_of(peer, record, costs) for peer, record in records.items() if record.role == "stage")
    return LoadView.of(now_s, costs, loads)


def stage_to_take(
    me: PeerLoad,
    records: Mapping[str, MemberRecord],
    costs: Sequence[StageCost],
    now_s: float,
    kept: Sequence[int],
    last: int | None = None,
) -> int | None:
    """Return the stage of a joiner: the first empty one whose state it has `kept`; where none is empty, its
    `last` one, whose group may lack its vote; else where it is worth most among all that are choosing now. None if it
    can serve none."""
    view = view_of(now_s, records, costs)
    taken = {load.stage for load in view.peers if load.peer != me.peer}
    full = taken.issuperset(range(len(costs)))
    back = [last] if last is not None and last in taken and full else []
    for stage in [*(stage for stage in kept if stage not in taken), *back]:
        if fits(me, costs[stage]):
            return stage
    view = LoadView.of(now_s, costs, (load for load in view.peers if load.peer != me.peer))
    others = {
        peer: load_of(peer, record, costs)
        for peer, record in records.items()
        if record.role == "stage" and record.stage < 0 and record.phase == CHOOSING
    }
    return stages_for_joiners(view, {**others, me.peer: me}.values()).get(me.peer)


def why_none_fits(me: PeerLoad, costs: Sequence[StageCost]) -> str:
    """Return the error for a joiner that can serve no stage."""
    have, least = me.memory_bytes / 1e9, min(cost.memory_bytes for cost in costs) / 1e9
    if have >= least:
        return (
            f"the stages that fit into {have:.2f} GB read the run's text, and this machine has none of it: name a"
            " folder of it with --data, or free some memory for another stage"
        )
    return (
        f"no stage fits into {have:.2f} GB (the smallest needs {least:.2f} GB): free some memory, or join with"
        " --role feeder"
    )


class Mover:
    """Decides on the moves of `peer`, once a period of the common clock (Unix time), so that peers with the same
    records decide the same; while a stage is empty, at every call."""

    def __init__(self, peer: str, costs: Sequence[StageCost], config: RebalanceConfig | None = None) -> None:
        self._peer = peer
        self._costs = costs
        self._config = config or RebalanceConfig()
        self._decided = -1

    def due(self, records: Mapping[str, MemberRecord], now_s: float) -> Move | None:
        """Return the move that the peer should start now, if any."""
        urgent = 0.0 in view_of(now_s, records, self._costs).throughputs()
        period_s = REFRESH_S if urgent else self._config.period_s(len(records))
        period = math.floor(now_s / period_s)
        if not urgent and period == self._decided:
            return None
        self._decided = period
        resting = {peer: replace(record, pinned=True) for peer, record in records.items() if is_resting(peer, period)}
        moves = decide(view_of(period * period_s, {**records, **resting}, self._costs), self._config)
        mine = next((move for move in moves if move.peer == self._peer), None)
        return mine if mine is not None and has_other_replica(self._peer, mine.source, records, now_s) else None


def is_resting(peer: str, period: int) -> bool:
    """Return whether `peer` rests in that period: the others neither expect it to move nor wait for it if it is in
    flight. A hash selects one peer in four. So a broken or hostile peer that does not move, or never arrives, delays
    the others for a few periods only."""
    return blake3(f"{peer}/{period}".encode()).digest(1)[0] < 64


def has_other_replica(peer: str, stage: int, records: Mapping[str, MemberRecord], now_s: float) -> bool:
    """Return whether another replica is at work in that stage."""
    return any(other != peer for other in at_work(stage, records, now_s))


def exceeds_move_limit(
    peer: str, records: Mapping[str, MemberRecord], now_s: float, config: RebalanceConfig | None = None
) -> bool:
    """Return whether the allowed number of moves were in flight before `peer` began its own: peers whose views differed
    may have begun together. As in `decide`, peers that rest, or are in flight for longer than the horizon, do not
    count."""
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
        and not is_resting(other, period)
    ]
    return len(earlier) >= config.flights(len(records))


def should_return(peer: str, records: Mapping[str, MemberRecord], now_s: float) -> bool:
    """Return whether a peer that moves goes back: the other replica of its old stage was lost meanwhile, so that stage
    has none left, while the new one has. Of several that left, one goes back."""
    mine = records.get(peer)
    if mine is None or mine.source < 0 or mine.source == mine.stage or not mine.moving(now_s):
        return False
    left = [p for p, r in records.items() if r.role == "stage" and r.source == mine.source and r.moving(now_s)]
    coming = any(r.role == "stage" and r.stage == mine.source for r in records.values())
    return peer == min(left) and not coming and bool(at_work(mine.stage, records, now_s))


def at_work(stage: int, records: Mapping[str, MemberRecord], now_s: float) -> dict[str, MemberRecord]:
    """Return the replicas of `stage` that have arrived there."""
    return {
        peer: record
        for peer, record in records.items()
        if record.role == "stage" and record.stage == stage and not record.moving(now_s)
    }


def replicas_of(
    stage: int, records: Mapping[str, MemberRecord], now_s: float, connected: Collection[str]
) -> dict[str, LoadReport]:
    """Return the load of the replicas of `stage` that micro-batches may be sent to. A client cannot be dialled, so it
    gets some only where it is connected."""
    return {
        peer: LoadReport(record.queue, record.service_s, record.at)
        for peer, record in at_work(stage, records, now_s).items()
        if not record.client or peer in connected
    }


def ready_after_s(me: PeerLoad, target: StageCost) -> float:
    """Return how long a peer that takes a stage now is expected to be out."""
    return START_S + min(move_s(me, target), 3600.0)
