"""Every number of a plan and a contribution is checked by its receiver; rosters are checked in `agreement`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optim.config import StreamingConfig
from peer.errors import ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Ledger, contains, count, overlaps
from swarm.protocol.plan import (
    CONTRIBUTION_KIND,
    Assignment,
    Contribution,
    WorkPlan,
    check_plan,
    make_plan,
    next_ledger,
)
from tests.swarm.support.group import open_contribution, regrouped, schedule_of

replace = msgspec.structs.replace
STEPS, BATCH, SLICES, COMPUTE_S = 10, 2, 5, 60.0
KEYS = sorted((Identity.generate() for _ in range(4)), key=lambda key: key.peer_id)
MEMBERS = tuple(Member(key.peer_id, "s") for key in KEYS)
HEAD = replace(
    regrouped(genesis("run", b"s" * 32), MEMBERS, 1), ledger=Ledger(cursor=1000, returned=((10, 13), (40, 90)))
)
SCHEDULE = schedule_of(STEPS, BATCH, 8, COMPUTE_S)
SPEEDS = dict.fromkeys(MEMBERS, 1.0)
PLAN = make_plan(HEAD, 0, SPEEDS, SCHEDULE)


def contribution(index: int, plan: WorkPlan = PLAN, **changes: Any) -> Signed:
    body = Contribution(
        head=plan.head,
        plan=plan.hash,
        member=MEMBERS[index],
        steps=STEPS,
        samples=STEPS * BATCH,
        loss=1.0,
        hashes=(b"h" * 32,) * SLICES,
        sqnorms=(1.0,) * SLICES,
    )
    return sign_body(KEYS[index], CONTRIBUTION_KIND, replace(body, **changes))


# -- plans ----------------------------------------------------------------------------------------------------------


def refuse(plan: WorkPlan, reason: str, head: Head = HEAD) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        check_plan(plan, head, SCHEDULE)


def with_ranges(*ranges: tuple[int, int]) -> WorkPlan:
    """The plan with other samples for the first member."""
    first = replace(PLAN.assignments[0], ranges=ranges)
    return replace(PLAN, assignments=(first, *PLAN.assignments[1:]))


def test_an_honest_plan_assigns_returned_samples_first() -> None:
    check_plan(PLAN, HEAD, SCHEDULE)
    handed = [r for a in PLAN.assignments for r in a.ranges]
    assert contains(handed, HEAD.ledger.returned)
    assert count(handed) == 4 * STEPS * BATCH


def test_plans_of_another_round_are_refused() -> None:
    refuse(replace(PLAN, head=b"x" * 32), "another round")
    refuse(replace(PLAN, round=10**9), "another round")
    refuse(PLAN, "another round", replace(HEAD, tokens=1))


def test_a_plan_names_each_peer_once() -> None:
    refuse(replace(PLAN, assignments=()), "twice, or no peer")
    refuse(replace(PLAN, assignments=(*PLAN.assignments, PLAN.assignments[0])), "twice, or no peer")
    other_session = replace(PLAN.assignments[0], member=Member(MEMBERS[0].peer, "t"), ranges=((2000, 2020),))
    refuse(replace(PLAN, assignments=(*PLAN.assignments, other_session)), "twice, or no peer")


@pytest.mark.parametrize("steps", [0, -1, STEPS + 1, 1 << 40])
def test_steps_are_bounded_by_the_manifest(steps: int) -> None:
    first = replace(PLAN.assignments[0], steps=steps)
    refuse(replace(PLAN, assignments=(first, *PLAN.assignments[1:])), "impossible amount")


def test_samples_must_be_free_distinct_and_real() -> None:
    refuse(with_ranges((1010, 1030)), "twice")  # the others' share of the fresh ones
    refuse(with_ranges((2000, 2020)), "not free")
    refuse(with_ranges((0, 10), (40, 50)), "not free")
    refuse(with_ranges((-20, 0)), "not free")
    refuse(with_ranges((2000, 2000), (10, 13), (40, 57)), "empty range")
    refuse(with_ranges((1000, 1030), (20, 10)), "empty range")
    refuse(with_ranges((10, 13)), "impossible amount")


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf, 60.1, 1e18])
def test_deadlines_are_bounded_by_the_manifest(deadline_s: float) -> None:
    refuse(replace(PLAN, deadline_s=deadline_s), "deadline")


AHEAD = dataclasses.replace(SCHEDULE, outer=StreamingConfig(steps=4 * STEPS, fragments=4))


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4), st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4))
def test_a_peer_that_trains_ahead_may_use_up_its_promise(now: list[float], then: list[float]) -> None:
    plan = make_plan(HEAD, 0, dict(zip(MEMBERS, now, strict=True)), AHEAD)
    check_plan(plan, HEAD, AHEAD)
    for a in plan.assignments:
        assert count(a.ahead) >= 1.25 * a.steps * BATCH > 0
    promised = tuple((a.member.peer, a.ahead) for a in plan.assignments)
    head = replace(HEAD, ledger=Ledger(10_000, (), promised))
    plan = make_plan(head, 0, dict(zip(MEMBERS, then, strict=True)), AHEAD)
    check_plan(plan, head, AHEAD)
    for i, a in enumerate(plan.assignments):
        assert a.ranges == head.ledger.promise(a.member.peer) and a.steps <= STEPS
        most = count(a.ranges) // BATCH
        assert a.steps <= most
        for steps, fits in ((most, True), (most + 1, False)):
            signed = contribution(i, plan, steps=steps, samples=steps * BATCH)
            if fits:
                open_contribution(signed, plan, SLICES, head, AHEAD)
            else:
                with pytest.raises(ProtocolViolation, match="more work"):
                    open_contribution(signed, plan, SLICES, head, AHEAD)


odd = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(odd, st.floats(0.01, 100.0)), min_size=1, max_size=4), st.integers(0, 500))
def test_plans_pass_the_check_for_any_reported_speeds(speeds: list[float], returned: int) -> None:
    head = replace(HEAD, ledger=Ledger(1000, ((0, returned),) if returned else ()))
    plan = make_plan(head, 3, dict(zip(MEMBERS, speeds, strict=False)), SCHEDULE)
    check_plan(plan, head, SCHEDULE)
    assert len(plan.assignments) == len(speeds)


def test_steps_are_proportional_to_speed() -> None:
    plan = make_plan(HEAD, 0, dict(zip(MEMBERS, [4.0, 2.0, 2.0, 0.0], strict=True)), SCHEDULE)
    assert [a.steps for a in plan.assignments] == [10, 5, 5, 5], "an unmeasured peer counts as a median one"
    assert plan.deadline_s == pytest.approx(2 * STEPS / 4.0 + 5)
    assert [a.steps for a in PLAN.assignments] == [10] * 4
    unknown = make_plan(HEAD, 0, dict.fromkeys(MEMBERS, 0.0), SCHEDULE)
    assert [a.steps for a in unknown.assignments] == [10] * 4 and unknown.deadline_s == COMPUTE_S


def test_a_false_speed_claim_does_not_starve_the_others() -> None:
    honest = make_plan(HEAD, 0, dict(zip(MEMBERS, [1e8, 1.0, 1.0, 1.0], strict=True)), schedule_of(100, BATCH))
    assert min(a.steps for a in honest.assignments) >= 20


# -- contributions --------------------------------------------------------------------------------------------------


def refuse_contribution(signed: Signed, reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        open_contribution(signed, PLAN, SLICES, HEAD, SCHEDULE)


def test_honest_and_empty_contributions_pass() -> None:
    assert open_contribution(contribution(1), PLAN, SLICES, HEAD, SCHEDULE).norm == pytest.approx(math.sqrt(SLICES))
    open_contribution(contribution(1, steps=0, samples=0, hashes=(), sqnorms=()), PLAN, SLICES, HEAD, SCHEDULE)
    open_contribution(contribution(1, steps=3, samples=6), PLAN, SLICES, HEAD, SCHEDULE)


def test_forged_and_foreign_contributions_are_refused() -> None:
    good = contribution(0)
    refuse_contribution(replace(good, signature=b"\0" * 64), "signature")
    refuse_contribution(replace(good, signer=KEYS[1].peer_id), "signature")
    refuse_contribution(replace(good, body=good.body[:-1]), "signature")
    refuse_contribution(sign_body(KEYS[0], "vote", PLAN), "signature")
    refuse_contribution(contribution(0, plan=replace(PLAN, attempt=1)), "another plan")
    refuse_contribution(contribution(0, head=b"x" * 32), "another plan")
    refuse_contribution(contribution(0, member=Member(KEYS[0].peer_id, "later life")), "another plan")
    key = KEYS[0]
    text = b"\x81\xa4head\xa2\xff\xff"
    refuse_contribution(Signed(text, key.peer_id, key.sign(b"barnraise/1/contribution\0" + text)), "malformed")
    deep = b"\x81\xa1z" + b"\x91" * 5000
    refuse_contribution(Signed(deep, key.peer_id, key.sign(b"barnraise/1/contribution\0" + deep)), "malformed")


@pytest.mark.parametrize(
    "claims",
    [
        {"steps": STEPS + 1, "samples": (STEPS + 1) * BATCH},
        {"samples": STEPS * BATCH + 1},
        {"steps": 1},
    ],
)
def test_claims_beyond_the_assignment_are_refused(claims: dict[str, Any]) -> None:
    refuse_contribution(contribution(0, **claims), "more work")


def test_slices_are_counted_and_norms_are_finite() -> None:
    refuse_contribution(contribution(0, hashes=(b"h" * 32,) * 4), "wrong number")
    refuse_contribution(contribution(0, sqnorms=(1.0,) * 6), "wrong number")
    refuse_contribution(contribution(0, hashes=(b"short",) * SLICES), "wrong number")
    refuse_contribution(contribution(0, steps=0, samples=0), "wrong number")
    for norm in (math.nan, math.inf, -1.0, 1e30):
        refuse_contribution(contribution(0, sqnorms=(norm,) * SLICES), "malformed")


# -- the next ledger --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, STEPS), min_size=4, max_size=4),
    st.sets(st.integers(0, 3)),
)
def test_samples_that_were_not_merged_are_returned(steps: list[int], dropped: set[int]) -> None:
    bodies = []
    for i, n in enumerate(steps):
        slices = SLICES if n else 0
        claims: dict[str, Any] = {"hashes": (b"h" * 32,) * slices, "sqnorms": (1.0,) * slices}
        signed = contribution(i, steps=n, samples=n * BATCH, **claims)
        bodies.append(open_contribution(signed, PLAN, SLICES, HEAD, SCHEDULE))
    merged = [body for i, body in enumerate(bodies) if i not in dropped and body.steps]
    assume(merged)
    after = replace(HEAD, round=1, ledger=next_ledger(HEAD, PLAN, merged, bodies, SCHEDULE))
    consumed = count([(0, after.ledger.cursor)]) - count(after.ledger.returned)
    before = count([(0, HEAD.ledger.cursor)]) - count(HEAD.ledger.returned)
    assert consumed - before == BATCH * sum(body.steps for body in merged), "no sample is lost or counted twice"
    again = make_plan(after, 0, SPEEDS, SCHEDULE)
    assert not overlaps({a.member.peer: a.ranges for a in again.assignments})


def test_an_assignment_is_found_by_member_not_by_peer() -> None:
    assert isinstance(PLAN.of(MEMBERS[0]), Assignment)
    assert PLAN.of(Member(MEMBERS[0].peer, "another life")) is None
