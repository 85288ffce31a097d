"""`peer regroup`: what a person is told."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from cli.commands.regroup import _remedy, told
from swarm.coordinator.regroup_files import GroupOutcome, Outcome
from tests.cli.support.typed import Peer
from tests.swarm.coordinator.run_scene import open_run


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        ("regrouped", "the run goes on from round 7 with 2 members (term 3)"),
        ("withdrawn", "the run goes on by itself from round 7: nothing was changed"),
        ("would_undo", "the run could go on only by undoing the rounds after 7: nothing was changed"),
        ("failed", "the run cannot go on from round 7: the group has not begun"),
        ("silent", "the run cannot go on from round 7: no peer answers that has its weights"),
    ],
)
def test_each_outcome_is_a_sentence(outcome: Outcome, sentence: str) -> None:
    assert told(GroupOutcome(outcome, None, 7, 3, 2, "the group has not begun")) == sentence
    assert told(GroupOutcome(outcome, 1, 7, 3, 2)).startswith("stage 1 ")


@pytest.mark.parametrize(
    ("outcomes", "remedy"),
    [
        (["failed", "would_undo"], "--undo"),
        (["failed", "silent"], "peer join INVITE --home"),
    ],
)
def test_a_group_that_cannot_go_on_is_an_error_with_its_remedy(outcomes: list[Outcome], remedy: str) -> None:
    assert remedy in _remedy([GroupOutcome(outcome, None, 7) for outcome in outcomes])


async def test_the_coordinator_of_a_home_is_asked(peer: Peer, tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=2) as run:
        asked = partial(peer, "regroup", "--home", run.home.path)
        before = await trio.to_thread.run_sync(asked)
        assert before.code == 7 and "1 group cannot go on yet" in before.stderr, before
        assert "the group has not begun" in before.stdout
        await run.enter()
        await run.enter()
        await run.until(lambda: run.groups[0].head.round >= 1)
        after = await trio.to_thread.run_sync(asked)
        assert after.code == 0 and "the run goes on by itself" in after.stdout, after
