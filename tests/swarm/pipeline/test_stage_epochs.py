"""A synchronous stage an epoch ahead of the others keeps the previous weights for them, or a substitute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import trio

from optim.config import AllReduceConfig
from optim.schedule import RoundInfo
from peer.model.layout import init_flat, join_flat, split_flat
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Ledger, Range
from swarm.protocol.plan import Assignment
from swarm.rounds.trainers.trainer import TrainRequest
from tests.peer.support.stage_harness import MODEL, SPLITS, whole_gradient
from tests.swarm.support.group import regrouped
from tests.swarm.support.pipeline_harness import MICRO, tokens_of
from tests.swarm.support.stage_replicas import Setting, StageMember
from tests.swarm.support.stage_scene import BATCH, kill_worker, scene_of, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are supervised through Linux's /proc"),
]
SETTING = Setting(2, AllReduceConfig(batch=BATCH), rounds=10)
START = split_flat(MODEL, init_flat(MODEL, seed=0), SPLITS[2])


def moved_weights(stage: int) -> torch.Tensor:
    noise = torch.randn(START[stage].shape, generator=torch.Generator().manual_seed(9))
    return START[stage] + 0.01 * noise


def head_of(member: StageMember, number: int, weights: torch.Tensor, members: tuple[Member, ...]) -> Head:
    """Return a head of that round; its state hash is made up from the weights."""
    name = f"{float(weights.double().sum()):.12f}".encode().ljust(32)[:32]
    head, ledger = member.head, Ledger(cursor=number * BATCH)
    return msgspec.structs.replace(head, round=number, state_hash=name, members=members, ledger=ledger)


async def settled(member: StageMember, head: Head) -> None:
    """Wait until its worker has the weights of `head`."""
    trainer = member.trainer
    await until(lambda: trainer.head == head and trainer._adoption is None and not trainer._is_lost())


async def check_loss(first: StageMember, epoch: int, weights: list[torch.Tensor]) -> None:
    """Check that a micro-batch dispatched for `epoch` goes through these weights."""
    tokens = tokens_of((epoch * BATCH, epoch * BATCH + MICRO))
    result = await first.replica.source.dispatch_one((epoch * BATCH, epoch * BATCH + MICRO), tokens, epoch=epoch)
    loss, _ = whole_gradient(MODEL, join_flat(MODEL, weights, SPLITS[2]), [tokens])
    assert result.done and result.loss / SETTING.rules.tokens == pytest.approx(loss, rel=1e-5)


async def test_lost_worker_keeps_the_previous_weights(tmp_path: Path) -> None:
    async with scene_of(tmp_path, SETTING, [1, 1]) as scene:
        with trio.fail_after(300):
            (first,), (last,) = scene.stages
            before = last.head
            await settled(last, before)
            head = head_of(last, 1, moved_weights(1), before.members)
            last.trainer.adopt(moved_weights(1), (slice(0, len(START[1])),), head)
            await settled(last, head)
            kill_worker(last)
            await until(lambda: last.replica.seen("worker_died"))
            await settled(last, head)
            await check_loss(first, 0, START)
            assert last.replica.server.accounting.counted == (), "it went through"
            assert torch.equal(last.replica.worker_group.outer, moved_weights(1))


async def test_possible_repeats_are_marked(tmp_path: Path) -> None:
    """Only a replica that worked on the round before knows that a sample is new. A new replica does not, and none does
    after a regroup, which begins the same round again."""
    async with scene_of(tmp_path, SETTING, [1, 1]) as scene:
        with trio.fail_after(300):
            (first,), _ = scene.stages
            dispatched: list[tuple[Range, bool]] = []

            async def note(ranges: tuple[Range, ...], again: bool, go_on: Callable[[], bool]) -> None:
                dispatched.extend((part, again) for part in ranges)

            source = first.trainer._source
            assert source is not None
            source.dispatch = note  # type: ignore[method-assign,assignment]
            head, members = first.head, first.head.members

            async def issued_after(head: Head) -> list[tuple[Range, bool]]:
                first.trainer.adopt(START[0], None, head)
                await settled(first, head)
                dispatched.clear()
                ranges = ((head.ledger.cursor, head.ledger.cursor + BATCH),)
                assignment = Assignment(members[0], ranges, BATCH // MICRO)
                await first.trainer._dispatch(
                    TrainRequest(assignment, RoundInfo(head.round + 1, head.inner_step, 0.0), (), 1, 60.0)
                )
                return list(dispatched)

            everything = (0, BATCH)
            assert await issued_after(head) == [(everything, False)]
            assert await issued_after(regrouped(head, members, head.term + 1)) == [(everything, True)]
            new = (BATCH, 2 * BATCH)
            assert await issued_after(head_of(first, 1, START[0], members)) == [(new, False)]
            first.trainer._worked_on = None  # as at a new replica
            assert await issued_after(head_of(first, 1, START[0], members)) == [(new, True)]


async def test_orphaned_weights_stand_in_for_the_previous(tmp_path: Path) -> None:
    """The last stage is one commit ahead, and no member that made it is left. Without a substitute the first stage
    would wait without end."""
    async with scene_of(tmp_path, SETTING, [1, 1]) as scene:
        with trio.fail_after(300):
            (first,), (last,) = scene.stages
            behind = head_of(first, 4, START[0], first.head.members)
            first.trainer.adopt(START[0], None, behind)
            kept = head_of(last, 5, moved_weights(1), (Member(last.replica.peer, "an earlier life"),))
            last.trainer.adopt(moved_weights(1), None, kept)
            await settled(last, kept)
            head = regrouped(kept, last.head.members, kept.term + 1)
            last.trainer.adopt(moved_weights(1), (), head)
            await settled(last, head)
            await settled(first, behind)
            await check_loss(first, 4, [START[0], moved_weights(1)])
            assert last.replica.server.accounting.counted == (), "it went through"
