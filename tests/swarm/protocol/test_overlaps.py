"""Contributions of a pipeline's stage: no sample is merged twice and none is lost, whatever the replicas claim."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.config import AllReduceConfig, DilocoConfig
from peer.errors import ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Ledger, Range, count, overlaps, union, without
from swarm.protocol.overlaps import covers_batch, select_disjoint
from swarm.protocol.plan import (
    CONTRIBUTION_KIND,
    RANGES_MAX,
    REACH_MAX,
    RETURNED_MAX,
    Contribution,
    WorkPlan,
    check_plan,
    make_plan,
    within_reach,
)
from swarm.protocol.round_schedule import RoundSchedule
from tests.swarm.support.group import committed, open_contribution, regrouped, schedule_of

replace = msgspec.structs.replace
STEPS, MICRO = 4, 2
KEYS = sorted((Identity.generate() for _ in range(4)), key=lambda key: key.peer_id)
MEMBERS = tuple(Member(key.peer_id, "s") for key in KEYS)
FIRST = dataclasses.replace(schedule_of(STEPS), stages=3, micro_batch=MICRO)
LATER = dataclasses.replace(FIRST, stage=1)
SYNCHRONOUS = dataclasses.replace(FIRST, outer=AllReduceConfig(batch=16))
SYNCHRONOUS_LATER = dataclasses.replace(SYNCHRONOUS, stage=2)
HEAD = replace(
    regrouped(genesis("group 1", b"s" * 32), MEMBERS, 1), ledger=Ledger(cursor=100, returned=((10, 14), (40, 90)))
)
WHOLE = replace(HEAD, ledger=Ledger(cursor=96))
SPEEDS = dict.fromkeys(MEMBERS, 1.0)


def body_of(index: int, plan: WorkPlan, counted: tuple[Range, ...], **changes: Any) -> Contribution:
    work = bool(counted)
    body = Contribution(
        head=plan.head,
        plan=plan.hash,
        member=MEMBERS[index],
        steps=int(work),
        samples=count(counted),
        loss=1.0,
        hashes=(b"h" * 32,) * work,
        sqnorms=(1.0,) * work,
        counted=counted,
    )
    return replace(body, **changes)


def signed_by(index: int, body: Contribution) -> Signed:
    return sign_body(KEYS[index], CONTRIBUTION_KIND, body)


def spans(*firsts: int) -> tuple[Range, ...]:
    return union((first, first + MICRO) for first in firsts)


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [LATER, SYNCHRONOUS_LATER])
def test_later_stages_are_assigned_no_samples(schedule: RoundSchedule) -> None:
    plan = make_plan(HEAD, 0, SPEEDS, schedule, reset={MEMBERS[1]})
    check_plan(plan, HEAD, schedule)
    assert all(a.ranges == () and a.steps == schedule.most_steps(HEAD) for a in plan.assignments)
    assert [a.reset for a in plan.assignments] == [False, True, False, False]
    assert plan.deadline_s == schedule.compute_s_max
    first = plan.assignments[0]
    for wrong, why in (
        (replace(first, ranges=((100, 104),)), "samples to a stage"),
        (replace(first, ahead=((100, 104),)), "samples to a stage"),
        (replace(first, steps=first.steps + 1), "work to a stage"),
    ):
        with pytest.raises(ProtocolViolation, match=why):
            check_plan(replace(plan, assignments=(wrong, *plan.assignments[1:])), HEAD, schedule)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
def test_the_first_stage_is_assigned_the_whole_synchronous_batch(speeds: list[float]) -> None:
    plan = make_plan(WHOLE, 0, dict(zip(MEMBERS, speeds, strict=False)), SYNCHRONOUS)
    check_plan(plan, WHOLE, SYNCHRONOUS)
    assert union(r for a in plan.assignments for r in a.ranges) == ((96, 112),)
    assert plan.deadline_s == SYNCHRONOUS.compute_s_max
    busy = max(plan.assignments, key=lambda a: a.steps)
    less = replace(busy, steps=busy.steps - 1, ranges=((busy.ranges[0][0], busy.ranges[0][1] - MICRO),))
    less = replace(less, ranges=tuple(r for r in less.ranges if r[0] < r[1]))
    with pytest.raises(ProtocolViolation, match="all of the run's batch"):
        check_plan(
            replace(plan, assignments=tuple(less if a is busy else a for a in plan.assignments)), WHOLE, SYNCHRONOUS
        )


def test_all_stages_advance_alike_in_the_schedule() -> None:
    assert LATER.advance(HEAD, 3) == FIRST.advance(HEAD, 17) == STEPS
    assert SYNCHRONOUS.advance(HEAD, 8) == 1 and schedule_of(STEPS).advance(HEAD, 3) == 3


# -- contributions ---------------------------------------------------------------------------------------------------


def refuse(schedule: RoundSchedule, reason: str, counted: tuple[Range, ...], head: Head = HEAD, **changes: Any) -> None:
    plan = make_plan(head, 0, SPEEDS, schedule)
    with pytest.raises(ProtocolViolation, match=reason):
        open_contribution(signed_by(0, body_of(0, plan, counted, **changes)), plan, 1, head, schedule)


def test_impossible_claims_are_refused() -> None:
    plan = make_plan(HEAD, 0, SPEEDS, LATER)
    for counted in ((), spans(10, 40, 100), spans(200)):
        open_contribution(signed_by(0, body_of(0, plan, counted)), plan, 1, HEAD, LATER)
    refuse(LATER, "no whole micro-batches", ((100, 101), (104, 106)))
    refuse(LATER, "no whole micro-batches", ((101, 103),))
    refuse(SYNCHRONOUS_LATER, "no whole micro-batches", ((97, 99),), WHOLE)
    refuse(LATER, "not free", spans(20))
    refuse(LATER, "not free", spans(14, 100))
    refuse(LATER, "not free", spans(1 << 50))
    refuse(LATER, "does not name the samples", ((100, 104), (102, 106)))
    refuse(LATER, "does not name the samples", ((104, 106), (100, 102)))
    refuse(LATER, "does not name the samples", ((100, 100), (102, 104)))
    refuse(LATER, "does not name the samples", spans(100), samples=4)
    refuse(LATER, "impossible", spans(100), steps=0)
    refuse(LATER, "impossible", spans(100), steps=LATER.most_steps(HEAD) + 1)
    refuse(LATER, "impossible", ((100, 100 + 2 * LATER.most_steps(HEAD) * LATER.batch_size),))


def test_the_first_stage_counts_only_its_samples() -> None:
    plan = make_plan(HEAD, 0, SPEEDS, FIRST)
    mine, other = plan.assignments[0].ranges, plan.assignments[1].ranges
    open_contribution(signed_by(0, body_of(0, plan, union(mine))), plan, 1, HEAD, FIRST)
    refuse(FIRST, "do not belong to this round", union(other))
    refuse(SYNCHRONOUS_LATER, "do not belong to this round", spans(112), WHOLE)
    refuse(SYNCHRONOUS, "do not belong to this round", spans(94, 96), replace(WHOLE, ledger=Ledger(96, ((90, 96),))))


def test_only_pipelines_name_counted_samples() -> None:
    refuse(schedule_of(STEPS), "only a stage", spans(100))


# -- what is merged --------------------------------------------------------------------------------------------------

claims = st.lists(st.sets(st.integers(0, 11), max_size=8), min_size=1, max_size=7)


def bodies_of(claimed: list[set[int]]) -> list[Contribution]:
    plan = make_plan(HEAD, 0, SPEEDS, LATER)
    return [body_of(0, plan, spans(*(100 + MICRO * k for k in claim))) for claim in claimed]


@settings(deadline=None)
@given(claims, st.data())
def test_what_is_merged_has_no_overlaps_and_leaves_out_only_rivals(
    claimed: list[set[int]], data: st.DataObject
) -> None:
    bodies = bodies_of(claimed)
    signed = [data.draw(st.sets(st.sampled_from(sorted(claim)))) if claim else set() for claim in claimed]
    receipts = [spans(*(100 + MICRO * k for k in own)) for own in signed]
    kept = select_disjoint(bodies, receipts)
    chosen = [claim for claim, merged in zip(claimed, kept, strict=True) if merged]
    assert sum(map(len, chosen)) == len(set().union(*chosen))
    for i, (claim, merged) in enumerate(zip(claimed, kept, strict=True)):
        rivals = [other for j, other in enumerate(claimed) if j != i and claim & other]
        assert merged or rivals, "one without a rival was left out"
    whole = set().union(*chosen)
    assert covers_batch([b for b, k in zip(bodies, kept, strict=True) if k], (100, 124)) == (len(whole) == 12)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=12, max_size=12), st.sets(st.integers(0, 11)), st.integers(0, 5))
def test_who_claims_what_others_have_receipts_for_takes_nothing(
    counted_by: list[int], claimed: set[int], liar: int
) -> None:
    """Honest replicas count each micro-batch once and have receipts; a liar claims any, and has one for its own."""
    honest = [{k for k, peer in enumerate(counted_by) if peer == i and peer != liar} for i in range(6)]
    own = {k for k, peer in enumerate(counted_by) if peer == liar}
    claims = [claim if i != liar else claimed | own for i, claim in enumerate(honest)]
    receipts = [spans(*(100 + MICRO * k for k in (claim if i != liar else own))) for i, claim in enumerate(honest)]
    kept = select_disjoint(bodies_of(claims), receipts)
    assert all(merged for i, merged in enumerate(kept) if i != liar)
    assert kept[liar] == (not (claimed - own))


def test_a_claim_of_everything_loses_to_all_without_any_receipt() -> None:
    claimed = [set(range(12)), {0, 1}, {2, 3, 4}, {5}, {6, 7, 8, 9}]
    assert select_disjoint(bodies_of(claimed)) == (False, True, True, True, True)
    assert select_disjoint(bodies_of([{0, 1}, {1, 2}, {2, 3}])) == (True, False, True)
    assert select_disjoint(bodies_of([{0, 1}, {1, 2, 3}])) == (False, True), "of two the larger one"


def test_scattered_claims_do_not_grow_the_head() -> None:
    """One member claims as many ranges as it may: half of them just ahead of the others, half as far as possible."""
    schedule = dataclasses.replace(LATER, outer=DilocoConfig(steps=1024))
    head, at = replace(HEAD, ledger=Ledger(cursor=100)), 100
    half = RANGES_MAX // 2
    for _ in range(4):
        plan = make_plan(head, 0, SPEEDS, schedule)
        near = [at + 200 + 2 * MICRO * k for k in range(half)]
        far = [head.ledger.cursor + (k + 1) * (REACH_MAX // half - 2 * MICRO) for k in range(half)]
        wanted = without(spans(*near, *far), without(spans(*near, *far), head.ledger.free))
        claims = [wanted[:RANGES_MAX], spans(at, at + 6), spans(at + 2, at + 12), spans(at + 8)]
        bodies = [body_of(i, plan, counted) for i, counted in enumerate(claims)]
        merged = [open_contribution(signed_by(i, body), plan, 1, head, schedule) for i, body in enumerate(bodies)]
        merged = list(within_reach(head, plan, merged, schedule))
        assert [body.member for body in merged] == list(MEMBERS[1:])
        head = committed(head, plan, merged, merged, schedule)
        assert len(head.ledger.returned) <= 2 * RETURNED_MAX
        assert len(msgspec.msgpack.encode(head)) < LARGE_HEADER_BYTES / 8
        assert head.ledger.is_free([(at + 4, at + 6), (at + 10, at + 12), (at + 14, at + 150)])
        assert not any(head.ledger.is_free(claim) for claim in claims[1:])
        at += 16


histories = st.lists(st.lists(st.sets(st.integers(0, 40), max_size=6), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(histories)
def test_over_many_rounds_every_sample_is_merged_once_or_free(
    rounds: list[list[set[int]]],
) -> None:
    head, merged_before = replace(HEAD, ledger=Ledger()), list[Range]()
    for claimed in rounds:
        plan = make_plan(head, 0, SPEEDS, LATER)
        opened = []
        for i, claim in enumerate(claimed):
            signed = signed_by(i, body_of(i, plan, spans(*(MICRO * k for k in claim))))
            try:
                opened.append(open_contribution(signed, plan, 1, head, LATER))
            except ProtocolViolation:
                assert overlaps({"before": tuple(merged_before), "now": spans(*(MICRO * k for k in claim))})
        merged = [body for body, kept in zip(opened, select_disjoint(opened), strict=True) if kept and body.steps]
        if not merged:
            continue
        head = committed(head, plan, merged, opened, LATER)
        merged_before += [r for body in merged for r in body.counted]
        assert not overlaps({"all": tuple(merged_before)}), "a sample was merged twice"
        seen = union([*merged_before, *head.ledger.returned])
        assert seen == union([(0, head.ledger.cursor)]), "a sample was lost"
        assert without(head.ledger.returned, merged_before) == head.ledger.returned
