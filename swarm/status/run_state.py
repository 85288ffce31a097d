"""The state of a training run, from one reading, the heads that are known and the events that were told. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Final

from msgspec.structs import replace

from peer.catalogue.rounds import AttemptFailed, RoundTrained, ValEvaluated
from peer.plain_text import plain
from swarm.membership.member_record import MemberRecord
from swarm.membership.vote_shares import VoteShare, alarms, caution, invites_of
from swarm.protocol.head import Head
from swarm.status.data_set_reading import data_set_state
from swarm.status.event_words import log_lines, names_told
from swarm.status.head_chain import HeadChain, absent_from, joined, left, took_part
from swarm.status.member_told import Told, members_told
from swarm.status.reading import RunReading
from swarm.status.record_history import Rate, RecordHistory, last_round
from swarm.status.servers import MEMBERS_SHOWN, NO_FACTS, met_with, served, server_members
from swarm.status.state import (
    LossPoint,
    MemberClaims,
    MemberFacts,
    MemberState,
    MemberTold,
    MonitorState,
    Outcome,
    RoundClaims,
    RoundFacts,
    RoundState,
    StageClaims,
    StageFacts,
    StageSeen,
    StageState,
    Watch,
)
from swarm.status.verdict import UNREAD, verdict_of

ROUNDS_SHOWN: Final = 60
LOSSES_SHOWN: Final = 240
CLAIMED_S_MAX: Final = 1e6


def run_state(
    reading: RunReading,
    chains: Sequence[HeadChain],
    told: Told,
    outcomes: Mapping[str, Outcome],
    history: RecordHistory,
    watch: Watch,
    names_invites: bool = False,
) -> MonitorState:
    """Return the state. `chains`: of each stage; `outcomes`: of asking each peer for its events; `names_invites`:
    whether the state may name invites and address prefixes."""
    manifest, names = reading.manifest, names_told(told) | history.names
    (round_, tokens), (val_loss, val_round) = reading.progress, reading.held_out
    shares, heads = reading.shares, [proven.head for proven in reading.best if proven]
    members, left_out = _members(reading, chains, told, outcomes, history.rates)
    complete = all(not chain.wants_older for chain in chains)
    served_round, troubles = served(manifest.model.layers, reading.servers, reading.at)
    state = MonitorState(
        kind="run",
        at=reading.at,
        run_id=manifest.run_id,
        name=plain(manifest.run.name, 64),
        open=manifest.run.open,
        method=str(manifest.outer.__struct_config__.tag),
        mode=manifest.agreement_mode if manifest.outer.has_common_state else "",
        codec=str(manifest.codec.up),
        compute_s_max=manifest.run.compute_s_max,
        coordinator_here=manifest.authority in {*reading.records, *reading.answering},
        failure=last_failure(chains, told),
        rounds_planned=manifest.run.rounds,
        round=round_,
        tokens=tokens,
        val_loss=val_loss,
        val_round=val_round,
        verdict=UNREAD,
        stages=tuple(_stage(reading, chain, stage) for stage, chain in enumerate(chains)),
        troubles=troubles,
        members=members,
        servers=server_members(reading.servers, reading.at, told, outcomes, history.rates),
        served_round=served_round,
        silent=reading.silent,
        judged=reading.judged,
        judges=reading.judges,
        rounds=tuple(_rounds(chains, told)),
        loss=_losses(reading, chains, told, history.losses),
        log=log_lines(told, names),
        names={peer: plain(name, 64) for peer, name in names.items()},
        cautions=tuple(plain(_caution(share, names_invites)) for share in alarms(shares)),
        shares=tuple(shares) if names_invites else (),
        guests=tuple(invites_of(heads, reading.records)) if names_invites else (),
        data_set=data_set_state(reading, told),
        monitor=replace(watch, members_left_out=left_out, history_complete=complete),
    )
    return replace(state, verdict=verdict_of(state, reading))


def last_failure(chains: Sequence[HeadChain], told: Told) -> str:
    """Return why the last attempt failed that a leader told of, if that was at a round that is not committed."""
    heads = [chain.last for chain in chains if chain.last]
    behind = min((head.round for head in heads), default=0)
    failed = [
        (at, event.reason)
        for events in told.values()
        for at, event in events
        if isinstance(event, AttemptFailed) and event.round > behind
    ]
    return plain(max(failed)[1], 120) if failed else ""


def _caution(share: VoteShare, whole: bool) -> str:
    """Return the warning, if not `whole` without the prefix itself: then no address is shown."""
    return (
        caution(share) if whole else caution(share).replace(f"the address prefix {share.prefix}", "one address prefix")
    )


def _stage(reading: RunReading, chain: HeadChain, stage: int) -> StageState:
    first, end = reading.manifest.cuts[stage]
    return StageState(
        stage=stage,
        first=first,
        end=end,
        facts=None if chain.last is None else _stage_facts(chain.last),
        seen=_stage_seen(reading, chain, stage),
        claims=_stage_claims(reading, stage),
    )


def _stage_seen(reading: RunReading, chain: HeadChain, stage: int) -> StageSeen:
    head, proven = chain.last, reading.best[stage]
    answering = len(set(head.members).intersection(proven.near)) if head and proven else 0
    seen_at = chain.seen_at.get(head.hash) if head else None
    return StageSeen(
        answering=answering,
        margin=answering - head.quorum if head and head.members else None,
        commit_age_s=None if seen_at is None else max(0.0, round(reading.at - seen_at, 1)),
        round_s=chain.round_s(),
    )


def _stage_claims(reading: RunReading, stage: int) -> StageClaims:
    whole = reading.manifest.stages == 1
    records = reading.full.values() if whole else [one for one in reading.records.values() if one.stage == stage]
    at_work = [record for record in records if not record.moving(reading.at)]
    queues = [record.queue for record in at_work if record.service_s > 0]
    phases = Counter(record.phase for record in at_work).most_common(1)
    return StageClaims(
        replicas=len(at_work),
        arriving=len(records) - len(at_work),
        rate=sum(record.rate for record in at_work),
        queue=fmean(queues) if queues else None,
        phase=plain(phases[0][0], 64) if phases else "",
        capacity=sum(1 / record.service_s for record in at_work if record.service_s > 0),
    )


def _stage_facts(head: Head) -> StageFacts:
    return StageFacts(
        round=head.round,
        term=head.term,
        tokens=head.tokens,
        state_hash=head.state_hash.hex(),
        members=len(head.members),
        quorum=head.quorum if head.members else 0,
        absent=len(head.absent),
        learners=len(head.learners),
    )


def _members(
    reading: RunReading,
    chains: Sequence[HeadChain],
    told: Told,
    outcomes: Mapping[str, Outcome],
    rates: Mapping[str, Rate],
) -> tuple[tuple[MemberState, ...], int]:
    """Return the peers that are shown, those in heads first, and how many are not."""
    records, answering, facts = reading.records, reading.answering, _member_facts(chains)

    def rank(peer: str) -> tuple[int, int, str, str]:
        record = records.get(peer)
        place = ("member", "learner", "none").index(facts.get(peer, NO_FACTS).membership)
        return place, record.stage if record else 0, record.name if record else "~", peer

    inside = (peer for peer, fact in facts.items() if fact.membership != "none")
    peers = sorted({*records, *inside}, key=rank)
    of_peers = members_told(told, reading.at)
    shown = tuple(
        MemberState(
            peer=peer,
            facts=facts.get(peer, NO_FACTS),
            seen=met_with(peer in answering, outcomes.get(peer), records[peer].addresses if peer in records else ()),
            claims=_claims(records[peer], reading.at, rates.get(peer)) if peer in records else None,
            told=of_peers.get(peer, MemberTold()),
        )
        for peer in peers[:MEMBERS_SHOWN]
    )
    return shown, max(0, len(peers) - MEMBERS_SHOWN)


def _member_facts(chains: Sequence[HeadChain]) -> dict[str, MemberFacts]:
    """Return what the heads say of each peer that one of them names."""
    heads = [chain.last for chain in chains if chain.last]
    members = {member.peer for head in heads for member in head.members}
    learners = {learner.member.peer for head in heads for learner in head.learners}
    merged, missed = Counter[str](), Counter[str]()
    for chain in chains:
        for before, head in chain.commits():
            merged.update(took_part(head))
            missed.update(absent_from(before, head))
    return {
        peer: MemberFacts(
            membership="member" if peer in members else "learner" if peer in learners else "none",
            merged=merged[peer],
            missed=missed[peer],
        )
        for peer in {*members, *learners, *merged, *missed}
    }


def _claims(record: MemberRecord, at: float, rate: Rate | None) -> MemberClaims:
    staged = record.stage >= 0
    return MemberClaims(
        name=plain(record.name, 64),
        role=record.role,
        version=plain(record.version, 64),
        phase=plain(record.phase, 64),
        age_s=round(at - record.at, 1),
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        up_bytes_s=rate[0] if rate else None,
        down_bytes_s=rate[1] if rate else None,
        round=_known(record.round),
        stage=_known(record.stage),
        source=_known(record.source),
        ready_in_s=round(record.ready_at - at, 1) if record.moving(at) else 0.0,
        state_hash=record.state_hash.hex(),
        client=record.client,
        queue=record.queue if staged else None,
        steps=record.steps,
        skipped=record.skipped,
        speed=(record.rate if staged else record.speed) if record.role in ("full", "stage") else None,
        service_s=record.service_s or None,
        loss=record.loss,
        val_loss=record.val_loss,
        val_round=_known(record.val_round),
    )


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def _rounds(chains: Sequence[HeadChain], told: Told) -> Iterator[RoundState]:
    """Yield the last commits of all stages, newest first, as heads tell them."""
    trained, failures = _told_of_rounds(told)
    share = max(4, ROUNDS_SHOWN // len(chains))
    found = []
    for stage, chain in enumerate(chains):
        for number, (before, head) in enumerate(chain.commits()):
            if number >= share or not (head.round or head.members):
                break
            part, of = took_part(head), stage if len(chains) > 1 else None
            ended = [(at, peer) for peer, at in trained.get(head.round, {}).items() if peer in part]
            reasons = failures.get((head.round, of), []) if head.attempt > 0 else []
            found.append(_round(stage, chain, before, head, ended, reasons))
    yield from sorted(found, key=lambda made: (made.term, made.round, made.stage), reverse=True)


def _round(
    stage: int,
    chain: HeadChain,
    before: Head | None,
    head: Head,
    ended: Sequence[tuple[float, str]],
    reasons: Sequence[str],
) -> RoundState:
    """`ended`: when each peer says that it ended its training; `reasons`: why attempts failed."""
    return RoundState(
        stage=stage,
        round=head.round,
        term=head.term,
        starts_term=head.attempt < 0,
        seen_at=chain.seen_at.get(head.hash),
        facts=_round_facts(before, head),
        claims=RoundClaims(
            last=max(ended)[1] if len(ended) > 1 else "",
            behind_s=round(min(CLAIMED_S_MAX, max(ended)[0] - min(ended)[0]), 1) if len(ended) > 1 else 0.0,
            failures=tuple(reasons[-4:]),
        ),
    )


def _round_facts(before: Head | None, head: Head) -> RoundFacts:
    return RoundFacts(
        took_part=took_part(head),
        absent=absent_from(before, head),
        joined=joined(before, head),
        left=left(before, head),
        discarded=max(0, head.attempt),
        members=len(head.members),
        tokens=head.tokens - before.tokens if before else 0,
    )


def _told_of_rounds(told: Told) -> tuple[dict[int, dict[str, float]], dict[tuple[int, object], list[str]]]:
    """Return when each peer ended its training of a round, and why attempts failed, by round and stage."""
    trained: dict[int, dict[str, float]] = {}
    failures: dict[tuple[int, object], list[str]] = {}
    for peer, events in told.items():
        for at, event in events:
            if isinstance(event, RoundTrained):
                trained.setdefault(event.round, {})[peer] = at
            elif isinstance(event, AttemptFailed):
                failures.setdefault((event.round, event.stage), []).append(plain(event.reason, 120))
    return trained, failures


def _losses(
    reading: RunReading, chains: Sequence[HeadChain], told: Told, claimed: Mapping[int, Mapping[str, float]]
) -> tuple[LossPoint, ...]:
    """Return the losses of the last rounds. Rounds that no head can have reached are not believed."""
    proved = (chain.last.round for chain in chains if chain.last)
    last = last_round(reading.records, proved, not reading.manifest.outer.has_common_state)
    train = {number: dict(of) for number, of in claimed.items() if number <= last}
    held_out: dict[int, float] = {}
    for peer, events in told.items():
        for _, event in events:
            if not isinstance(event, RoundTrained | ValEvaluated) or not 0 <= event.round <= last:
                continue
            if event.loss is None or not math.isfinite(event.loss):
                continue
            if isinstance(event, RoundTrained):
                train.setdefault(event.round, {})[peer] = event.loss
            else:
                held_out[event.round] = event.loss
    numbers = sorted(train.keys() | held_out.keys())[-LOSSES_SHOWN:]
    return tuple(
        LossPoint(
            round=number,
            train=median(train[number].values()) if number in train else None,
            peers=len(train.get(number, ())),
            held_out=held_out.get(number),
        )
        for number in numbers
    )
