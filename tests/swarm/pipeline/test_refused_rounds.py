"""A pipeline whose stages refuse all micro-batches for NaN makes no step that could be skipped: it has diverged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from cli.run import leaves
from optim.strategies.interface import RoundInfo
from peer.errors import Diverged
from peer.events import EventLog
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.source import SourceTotals
from swarm.pipeline.synchronous import Synchronous
from swarm.protocol.head import Member
from swarm.protocol.plan import Assignment
from swarm.rounds.trainers.trained_rounds import DIVERGED_ATTEMPTS, TrainedRounds
from swarm.rounds.trainers.trainer import TrainRequest

REQUEST = TrainRequest(Assignment(Member("me", "s"), ((0, 16),), 6), RoundInfo(2, 0, 1.0), (slice(0, 4),), 1, 10.0)


def test_refused_micro_batches_are_steps_that_were_skipped() -> None:
    totals = SourceTotals()
    trainer = SimpleNamespace(_source=SimpleNamespace(totals=totals), _refused=0, _steps=0, _skipped=0)

    def refused_steps() -> int:
        return LocalSteps._refused_steps(cast(Any, trainer), REQUEST)

    assert refused_steps() == 0
    totals.not_finite = 3
    assert refused_steps() == 6 and refused_steps() == 0, "those since the last capture"
    totals.not_finite, trainer._steps = 4, 1
    assert refused_steps() == 0, "a step was made of the others"
    trainer._source = cast(Any, None)
    assert refused_steps() == 0, "a later stage dispatches nothing"


@pytest.mark.parametrize("completes", [False, True])
async def test_a_batch_that_is_refused_again_and_again_ends_the_peer(
    completes: bool, autojump_clock: trio.testing.MockClock
) -> None:
    totals, refusals = SourceTotals(), 0
    accounting = SimpleNamespace(micro_batch=4)
    trainer = SimpleNamespace(_accounting=accounting, trained=TrainedRounds(EventLog()))

    async def refuse() -> None:
        nonlocal refusals
        for _ in range(DIVERGED_ATTEMPTS):
            await trio.sleep(5)
            refusals += 1
            totals.not_finite += 4
            totals.completed += completes
        await trio.sleep(5)

    with trio.move_on_after(1000) as scope:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Synchronous._watch_refusals, cast(Any, trainer), REQUEST, totals)
                await refuse()
                nursery.cancel_scope.cancel()
        except BaseException as error:  # noqa: BLE001  a group, of which Python 3.10 has none
            assert not completes and [type(cause) for cause in leaves(error)] == [Diverged]
            return
    assert completes and not scope.cancelled_caught
