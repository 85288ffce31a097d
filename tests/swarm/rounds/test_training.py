"""An update whose plan was replaced, stopped or settled: it is merged once or goes into the next one, never both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from peer.events import EventLog
from swarm.protocol.agreement import events
from swarm.protocol.head import Member, genesis
from swarm.protocol.plan import Assignment, WorkPlan
from swarm.rounds.training import Training
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.rounds.test_losses import QUICK
from tests.swarm.support.driven_group import GroupSetting, open_driven_group
from tests.swarm.support.group import regrouped

ME = Member("me", "s")
HEAD = regrouped(genesis("run", b"s0" * 16), (ME,), 1)


class Encoder:
    """In place of a contributor: encodes until `encoded`, even if cancelled."""

    def __init__(self) -> None:
        self.begun, self.encoded = trio.Event(), trio.Event()
        self.restored: list[object] = []
        self.made = 0

    async def contribute(self, *_: object) -> tuple[str, str]:
        with trio.CancelScope(shield=True):
            self.begun.set()
            await self.encoded.wait()
        self.made += 1
        return "contribution", f"update {self.made}"

    def restore_residual(self, update: object) -> None:
        self.restored.append(update)


def plan_of(attempt: int) -> WorkPlan:
    return WorkPlan(HEAD.hash, 1, attempt, (Assignment(ME, (), 1),), 1.0)


def training_of(encoder: Encoder) -> tuple[Training, list[events.Event]]:
    first = SimpleNamespace(round=1, step=0)
    schedule = SimpleNamespace(synchronous=False, by_link=False, round_info=lambda head: first)
    trainer = SimpleNamespace(is_exhausted=lambda number: False, speed=1.0, finish_early=lambda: None)
    context = SimpleNamespace(me=ME, events=EventLog(), schedule=schedule, trainer=trainer)
    told: list[events.Event] = []
    training = Training(cast(Any, context), told.append)
    training._contributor = cast(Any, encoder)
    return training, told


async def test_an_update_of_a_replaced_plan_is_restored() -> None:
    """The new plan comes while the old one's update is being encoded, which nothing can interrupt."""
    encoder = Encoder()
    training, told = training_of(encoder)
    nothing = cast(Any, None)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            training.begin(plan_of(0), HEAD, nothing, False, nursery)
            await encoder.begun.wait()
            training.begin(plan_of(1), HEAD, nothing, False, nursery)
            encoder.encoded.set()
    assert encoder.restored == ["update 1"]
    assert len(told) == 1, "one submission: that of the new plan"
    assert training.plan is not None and training.plan.attempt == 1 and training.update == "update 2"


@pytest.mark.parametrize("merged", [True, False])
async def test_an_update_is_restored_unless_it_was_merged(merged: bool) -> None:
    encoder = Encoder()
    encoder.encoded.set()
    training, told = training_of(encoder)
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            training.begin(plan_of(0), HEAD, cast(Any, None), False, nursery)
    assert told and training.update == "update 1"
    training.settle(merged)
    assert encoder.restored == ([] if merged else ["update 1"])
    training.stop("too late")  # counted once, whatever comes after
    training.settle(False)
    assert encoder.restored == ([] if merged else ["update 1"])


async def test_what_was_not_merged_goes_into_the_next_update_once(tmp_path: Path) -> None:
    """A member is cut off while the others commit without it."""
    seen: dict[str, list[Any]] = {}
    setting = GroupSetting(codec="fp32", limits=QUICK, work_s=0.2)
    async with open_driven_group(tmp_path, setting) as group:
        away, *others = [await group.enter(deltas) for _ in range(3)]
        contributor = away.actor.training._contributor
        restore = contributor.restore_residual

        def note(update: Any) -> None:
            seen.setdefault("restored", []).append(update.hashes)
            restore(update)

        contributor.restore_residual = note  # type: ignore[method-assign]
        await group.until_round(1)
        group.part([away.peer], [*(other.peer for other in others), group.coordinator_host.peer_id])
        await group.until_round(away.head.round + 3, others)
        group.heal()
        await group.until(lambda: away.head.has(away.driver.me) and away.head.round > others[0].head.round - 2)
        await group.until(lambda: any(body.member == away.driver.me for body in others[0].merged[-1] or ()))
        merged = [body.hashes for bodies in others[0].merged for body in bodies or () if body.member == away.driver.me]
        group.check()
    assert len(merged) == len(set(merged)), "no update is merged twice"
    assert not set(merged) & set(seen.get("restored", ())), "none is both merged and kept for the next"
