"""`peer regroup`: what a person is told."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from cli.commands.regroup import _remedy, told
from peer.identity import Identity
from swarm.coordinator.regroup_files import GroupOutcome, Outcome
from tests.cli.support.typed import Peer
from tests.swarm.coordinator.run_scene import open_run


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        ("resumed", "the run resumes from round 7 with 2 members (term 3)"),
        ("withdrawn", "the run continues by itself from round 7: nothing changed"),
        ("would_undo", "the run could continue only by undoing 3 rounds and resuming from round 7: nothing changed"),
        ("failed", "the run is stuck at round 7: the disk is full"),
        ("silent", "the run is stuck at round 7: no peer answers that has its weights"),
        ("begun", "the run begins with 2 members"),
        ("unbegun", "the run has not begun: 1 peer of it is connected, and the run begins with 4"),
        ("unnamed", "the run stays at round 7: p does not answer. Alive elsewhere, what they do then is lost"),
    ],
)
def test_each_outcome_is_a_sentence(outcome: Outcome, sentence: str) -> None:
    found = GroupOutcome(outcome, None, 7, 3, 2, "the disk is full", ("p",), connected=1, needed=4, undone=3)
    assert told(found) == sentence
    assert told(msgspec.structs.replace(found, stage=1)).startswith("stage 1 ")


@pytest.mark.parametrize(
    ("outcomes", "remedy"),
    [
        (["failed", "would_undo"], "or undo them by the line above"),
        (["failed", "silent"], "`peer join --home DIR` where it ran"),
        (["unnamed", "unbegun"], "or exclude them for good by the line above"),
        (["unbegun"], "it begins by itself once 4 peers are connected and ready: start more with `peer join INVITE`"),
    ],
)
def test_a_group_that_cannot_go_on_is_an_error_with_its_remedy(outcomes: list[Outcome], remedy: str) -> None:
    stuck = [GroupOutcome(outcome, None, 7, connected=1, needed=4) for outcome in outcomes]
    assert remedy in _remedy(stuck).advice


def test_of_two_branches_it_says_how_to_choose() -> None:
    found = GroupOutcome("would_undo", None, 43, connected=1, undone=9, branches=("round 43 with B", "round 3 with A"))
    assert "add --without for its peers" in _remedy([found]).advice


@pytest.mark.parametrize("outcome", ["failed", "silent", "unnamed"])
def test_where_no_peer_answers_yet_it_is_too_early_to_leave_members_out(outcome: Outcome) -> None:
    found = GroupOutcome(outcome, None, 7, reason="no peer holds it", away=("p", "q"), alone=True)
    assert told(found).endswith("from round 7: no peer answers yet") or told(found).endswith(
        "at round 7: no peer answers yet"
    )
    remedy = _remedy([found])
    assert remedy.advice.startswith("wait until its members are connected") and not (remedy.without or remedy.undo)


async def test_no_peer_is_left_out_and_taken_back_at_once(peer: Peer, tmp_path: Path) -> None:
    id = Identity.generate().peer_id
    refused = peer("regroup", "--home", tmp_path, "--without", id, "--readmit", id)
    assert refused.code == 2 and f"--without and --readmit both name {id}: give one of them" in refused.stderr, refused


async def test_the_coordinator_of_a_home_is_asked(peer: Peer, tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=2) as run:
        asked = partial(peer, "regroup", "--home", run.home.path)
        before = await trio.to_thread.run_sync(asked)
        assert before.code == 7 and "1 group cannot continue:" in before.stderr, before
        assert "the run has not begun: 0 peers of it are connected, and the run begins with 2" in before.stdout
        assert "it begins by itself once 2 peers" in before.stderr and "peer regroup" not in before.stderr
        await run.enter()
        await run.enter()
        await run.until(lambda: run.groups[0].head.round >= 1)
        after = await trio.to_thread.run_sync(asked)
        assert after.code == 0 and "the run continues by itself" in after.stdout, after


async def test_a_restored_coordinator_that_has_not_begun_says_what_it_waits_for(peer: Peer, tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=1) as run:
        await run.restart(restored=True)
        early = await trio.to_thread.run_sync(partial(peer, "regroup", "--home", run.home.path))
        assert early.code == 7 and "the run has not begun: 0 peers of it are connected" in early.stdout
        assert "wait until 1 peer" in early.stderr and "a restored coordinator begins nothing before" in early.stderr
        await run.enter()
        group = run.groups[0]
        await run.until(lambda: group.driver._node._applicants.first()[0])
        (words,) = [line for line in early.stderr.splitlines() if line.startswith("peer ")]
        begun = await trio.to_thread.run_sync(partial(peer, *shlex.split(words)[1:]))
        assert begun.code == 0 and "the run begins with 1 member" in begun.stdout
