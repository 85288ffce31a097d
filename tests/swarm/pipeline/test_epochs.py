"""Micro-batches between stages an epoch apart: held, passed through with the previous weights, or counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import trio

from peer.model.layout import init_flat, join_flat, split_flat
from swarm.pipeline.messages import COUNTED, IS_COUNTED, AskCounted, IsCountedQuery
from swarm.protocol.ledger import Ledger
from tests.peer.support.stage_harness import MODEL, SPLITS, relative, whole_gradient
from tests.swarm.support.pipeline_harness import head_at, open_replicas, rules_of, serving, tokens_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]
SPANS = [(0, 2), (2, 4), (4, 6)]


def start() -> torch.Tensor:
    return init_flat(MODEL, seed=0)


def moved_weights(stage: int) -> torch.Tensor:
    """Weights of a stage after a commit."""
    part = split_flat(MODEL, start(), SPLITS[2])[stage]
    return part + 0.01 * torch.randn(part.shape, generator=torch.Generator().manual_seed(9))


async def test_synchronous_stages_an_epoch_apart(tmp_path: Path) -> None:
    rules = rules_of(2, synchronous=True, round_samples=4)
    next_round = Ledger(cursor=4)
    async with open_replicas(tmp_path, [1, 1], previous=True) as stages, serving(stages, rules):
        first, last = stages[0][0], stages[1][0]
        for span in SPANS[:2]:
            assert (await first.source.dispatch_one(span, tokens_of(span))).counted
        assert (await first.source.dispatch_one(SPANS[2], tokens_of(SPANS[2]))).counted is False, (
            "of the next round's batch"
        )
        assert len((await last.worker_group.take_gradient()).micro_batches) == 2
        await first.worker_group.take_gradient()

        # The last stage has committed. What was dispatched before goes through with the weights of then.
        first.server.moved(head_at(rules, 0))
        await first.worker_group.import_weights(epoch=0)
        last.worker_group.outer.copy_(moved_weights(1))
        last.server.moved(head_at(rules, 1, 1, next_round))
        await last.worker_group.import_weights(epoch=1)
        result = await first.source.dispatch_one(SPANS[0], tokens_of(SPANS[0]))
        assert result.counted
        assert last.server.accounting.counted == ()
        assert (await last.worker_group.take_gradient()).micro_batches == ()
        loss, _ = whole_gradient(MODEL, start(), [tokens_of(SPANS[0])])
        assert result.loss / rules.tokens == pytest.approx(loss, rel=1e-5)

        # The first stage commits twice. What it dispatches then waits until the last one has done so, too.
        first.worker_group.outer.copy_(moved_weights(0))
        for epoch in (1, 2):
            first.server.moved(head_at(rules, 0, epoch, next_round))
            await first.worker_group.import_weights(epoch=epoch)
        await first.worker_group.take_gradient()
        held = last.listener.has_later = trio.Event()
        done: list[bool] = []

        async def dispatch() -> None:
            result = await first.source.dispatch_one(SPANS[2], tokens_of(SPANS[2]))
            done.append(result.counted)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatch)
            await held.wait()
            assert last.server.handlers.later_epoch == 2 and not done and last.server.load().queue == 0
            last.server.moved(head_at(rules, 1, 2, next_round))
            await last.worker_group.import_weights(epoch=2)
        assert done == [True] and last.server.accounting.counted == (SPANS[2],)
        flat = join_flat(MODEL, [moved_weights(0), moved_weights(1)], SPLITS[2])
        _, exact = whole_gradient(MODEL, flat, [tokens_of(SPANS[2])])
        for replica in (first, last):
            await replica.worker_group.take_gradient()
        assert relative(join_flat(MODEL, [first.worker_group.delta, last.worker_group.delta], SPLITS[2]), exact) < 1e-5


async def test_local_steps_count_an_epoch_apart(tmp_path: Path) -> None:
    rules = rules_of(2)
    async with open_replicas(tmp_path, [1, 1]) as stages, serving(stages, rules):
        first, last = stages[0][0], stages[1][0]
        for epoch, span in enumerate(SPANS[:2]):
            first.server.moved(head_at(rules, 0, epoch))
            await first.worker_group.import_weights(epoch=epoch)
            assert (await first.source.dispatch_one(span, tokens_of(span))).counted
        assert last.listener.later == [1] and last.server.accounting.counted == ((0, 4),)

        group = rules.groups[1]
        seen = await first.host.rpc.call(last.peer, IS_COUNTED, IsCountedQuery(group, tuple(SPANS)), timeout_s=60)
        assert seen.body.counted == (True, True, False)
        for asked, epoch, spans in ((group, 0, ((0, 4),)), (group, 1, ((0, 4),)), (rules.groups[0], 0, ())):
            counted = await first.host.rpc.call(last.peer, COUNTED, AskCounted(asked, epoch), timeout_s=60)
            assert counted.body.ranges == spans

        # Dispatched again, it goes through and is not counted.
        again = await first.source.dispatch_one(SPANS[0], tokens_of(SPANS[0]), again=True)
        assert again.done and not again.counted
        assert len((await last.worker_group.take_gradient()).micro_batches) == 2


async def test_lost_worker_is_reported(tmp_path: Path) -> None:
    rules = rules_of(2)
    async with open_replicas(tmp_path, [1, 1]) as stages, serving(stages, rules):
        first, last = stages[0][0], stages[1][0]
        assert (await first.source.dispatch_one(SPANS[0], tokens_of(SPANS[0]))).counted
        last.kill_worker()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.source.dispatch_one, SPANS[1], tokens_of(SPANS[1]))
            await last.listener.has_lost.wait()
            assert last.server.accounting.counted == ()
            await last.worker_group.import_weights(epoch=0)
        assert last.server.accounting.counted == (SPANS[1],)
        assert first.server.accounting.counted == ((0, 4),)
        assert (await last.worker_group.take_gradient()).micro_batches == ("2",)
