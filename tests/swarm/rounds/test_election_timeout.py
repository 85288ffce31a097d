"""The time that leaders of a synchronous pipeline have while the batch makes no progress."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from optim.config import AllReduceConfig
from swarm.protocol.head import Member
from swarm.protocol.plan import WorkPlan, make_plan
from swarm.rounds.election_timeout import FIRST_BATCH_S, STEPS_PER_LEADER, WAIT_FACTOR, ElectionTimeout
from swarm.rounds.round_state import RoundState
from tests.swarm.pipeline.test_stage_groups import unused
from tests.swarm.support.group import open_group, schedule_of

SCHEDULE = dataclasses.replace(
    schedule_of(4, compute_s_max=3600.0), stage=1, stages=2, micro_batch=2, outer=AllReduceConfig(batch=12)
)
NAMES = ("a", "b", "c")
PLAN_S = 10.0


@asynccontextmanager
async def waiting(
    folder: Path, names: Sequence[str] = NAMES
) -> AsyncIterator[tuple[ElectionTimeout, RoundState, WorkPlan]]:
    """The election timeout of a member of such a group."""
    async with open_group(folder, 100) as group:
        group.schedule = SCHEDULE
        async with group.join(unused) as replica:
            head = group.genesis().regrouped(tuple(Member(name, "s") for name in names), 1)
            round_state = RoundState(head, replica.context.me)
            plan = make_plan(head, 0, dict.fromkeys(head.members, 1.0), SCHEDULE)
            yield ElectionTimeout(replica.context, round_state), round_state, plan


def lead(election_timeout: ElectionTimeout, round_state: RoundState, leader: str) -> bool:
    """Let a leader send a plan; return whether it got its time for it."""
    began = round_state.step_deadline = trio.current_time()
    election_timeout.allow(leader, "promises", 1.0)
    election_timeout.allow_work(leader, b"plan", PLAN_S)
    return round_state.step_deadline >= began + PLAN_S


async def test_all_leaders_get_time_again_after_a_rotation(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (election_timeout, round_state, plan):
        before = election_timeout.time_for(plan)
        assert before == FIRST_BATCH_S
        for turn in range(2 * STEPS_PER_LEADER):
            for name in NAMES:
                assert lead(election_timeout, round_state, name), f"turn {turn} of {name}"
                assert not lead(election_timeout, round_state, name), "repetition does not extend its time"
            assert election_timeout.time_for(plan) == min(plan.deadline_s, 2**turn * before)


async def test_two_leaders_that_alternate_get_their_time_once(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (election_timeout, round_state, _):
        assert lead(election_timeout, round_state, "a") and lead(election_timeout, round_state, "b")
        assert not any(lead(election_timeout, round_state, name) for name in ("a", "b") * STEPS_PER_LEADER)
        assert lead(election_timeout, round_state, "c")


async def test_a_leader_that_is_given_up_counts_as_having_led(tmp_path: Path) -> None:
    """Member `c` has moved to another stage: it is alive but never leads."""
    async with waiting(tmp_path) as (election_timeout, round_state, plan):
        for turn in range(3):
            for name in ("c", "a", "b"):
                election_timeout.follow(name)
                assert name == "c" or lead(election_timeout, round_state, name), f"turn {turn} of {name}"
            assert election_timeout.time_for(plan) == min(plan.deadline_s, 2**turn * FIRST_BATCH_S)


async def test_the_only_leader_left_gets_time_again(tmp_path: Path) -> None:
    async with waiting(tmp_path, ("a", "b")) as (election_timeout, round_state, _):
        for turn in range(3):
            election_timeout.follow("a")
            assert lead(election_timeout, round_state, "a"), f"turn {turn}"
            assert not lead(election_timeout, round_state, "a"), "repetition does not extend its time"
            election_timeout.follow("b")


async def test_a_batch_has_four_times_its_usual_time(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (election_timeout, _, plan):
        for seconds in (2.0, 900.0, 3.0):
            election_timeout._context.timeouts.note_batch(seconds)
        assert election_timeout.time_for(plan) == pytest.approx(WAIT_FACTOR * 3.0)
        for _ in range(2):
            election_timeout._context.timeouts.note_batch(5000.0)
        assert election_timeout.time_for(plan) == plan.deadline_s == 3600.0
