"""Bringing a lost stage back, in real processes: after the coordinator's restart by a person's word, a backup holder's
commit, a mover that returns, and a peer that has the text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from tests.support.forking.command import peer_meanwhile
from tests.swarm.support.pipeline_run import Pipeline, Replica, open_pipeline

pytestmark = [pytest.mark.soak, pytest.mark.process]

LOCAL = '[outer]\nmethod = "diloco"\nsteps = 20'


async def test_a_stage_and_the_coordinator_are_lost_at_once(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path, LOCAL, [0, 0, 1, 1, 2, 2]) as pipeline:
        coordinator = pipeline.swarm.coordinator

        def is_past() -> bool:
            seen = [fact.fields["round"] for fact in coordinator.all("head_seen") if fact.fields["stage"] == 2]
            return 1 <= kept_round(pipeline, 2) <= max(seen, default=0) - 2

        await pipeline.until(is_past, "the coordinator has seen two rounds more than are kept", 180)
        coordinator.kill()
        kept, since, mark = kept_round(pipeline, 2), time.time(), coordinator.mark()
        lose(pipeline, pipeline.of(2))
        pipeline.swarm.restart(coordinator)
        newcomer = pipeline.join()
        # One that has heard no member of the stage since it began cannot know that its disk is the newest.
        lost = await coordinator.wait_for("quorum_lost", lambda fields: fields["stage"] == 2, mark)
        await newcomer.peer.wait_for("stage_restored")
        await a_person_regroups(pipeline, lost.fields["away"])
        await pipeline.until(lambda: pipeline.advanced(since), "the run goes on", 180)
        assert newcomer.stage == 2
        (restored,) = newcomer.peer.all("stage_restored")
        (back,) = [fact for fact in coordinator.all("stage_set_back") if fact.at > since]
        assert back.fields["round"] == restored.fields["round"] == kept
        assert not pipeline.twice() and not pipeline.forks()


async def test_a_mover_is_sent_back_if_the_other_replica_dies(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path, LOCAL, [0, 0, 1, 2, 2]) as pipeline:
        mover = pipeline.join()  # only now: who starts together with the others may choose before their records are out
        await pipeline.whole(timeout_s=240.0)
        assert mover.stage == 1, "where one was missing"
        (replacement,) = [replica for replica in pipeline.of(1) if replica is not mover]
        witness = pipeline.of(2)[0].peer
        mover.arm("move:at_replica:0", "stop:arriving:0")
        await mover.peer.wait_stopped(120)
        since = time.time()
        lose(pipeline, [replacement])
        await witness.wait_for("stages_missing", lambda fields: fields["stages"] == ["1"], witness.mark())
        mover.peer.thaw()
        await pipeline.until(lambda: pipeline.advanced(since), "the run goes on", 180)
        moves = [fact.fields for fact in mover.peer.all("move_started")]
        assert [(move["source"], move["target"]) for move in moves] == [(1, 0), (0, 1)]
        assert moves[-1]["gain"] == 0.0, "no decision of all: it turned back"
        assert mover.stage == 1 and not pipeline.twice() and not pipeline.forks()


async def test_the_first_stage_waits_for_somebody_with_the_text(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path, LOCAL, [0, 1, 2, 2]) as pipeline:
        # Not the first state: only a person gives up all that was learned.
        await pipeline.until(lambda: kept_round(pipeline, 0) >= 1, "the first stage is kept", 120)
        since = time.time()
        lose(pipeline, pipeline.of(0))
        (tmp_path / "empty").mkdir()
        without = pipeline.join(None, "--data", str(tmp_path / "empty"))
        await without.peer.wait_for("replica_opened", timeout_s=180)
        assert without.stage > 0, "the empty one would gain most"
        reader = pipeline.join()
        await pipeline.until(lambda: pipeline.advanced(since), "the run goes on", 180)
        assert reader.stage == 0 and without.stage > 0 and not without.peer.all("move_started")


async def a_person_regroups(pipeline: Pipeline, away: Sequence[str], timeout_s: float = 120.0) -> None:
    """Give `peer regroup` without these, again while no peer that answers has the stage's weights yet."""
    home, without = pipeline.swarm.coordinator.home, [word for peer in away for word in ("--without", peer)]
    with trio.fail_after(timeout_s):
        while (await peer_meanwhile("regroup", "--home", home, "--undo", *without)).returncode:
            await trio.sleep(1.0)


def kept_round(pipeline: Pipeline, stage: int) -> int:
    """Of the newest commit of that stage that others keep; -1: none."""
    facts = [fact.fields for peer in pipeline.all_peers() for fact in peer.all("backup_saved")]
    return max((int(fields["round"]) for fields in facts if fields["stage"] == stage), default=-1)


def lose(pipeline: Pipeline, victims: list[Replica]) -> None:
    for victim in victims:
        victim.peer.kill()
        pipeline.replicas.remove(victim)
