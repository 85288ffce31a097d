"""All replicas of a stage die at once: the run pauses and says so, somebody takes the stage from a kept commit, and the
run goes on, in either mode."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cli.demo.child_processes import ChildPeer, Children, children
from cli.demo.cluster import LocalCluster
from cli.progress.progress import Progress
from tests.processes.test_pipeline_quickstart import ROUNDS as FEW
from tests.processes.test_pipeline_quickstart import RUN, stages_of

pytestmark = [pytest.mark.soak, pytest.mark.process]

ROUNDS = 1000  # more than these tests see
LOCAL = 'method = "diloco"\nsteps = 80'
SYNCHRONOUS = 'method = "allreduce"\nbatch = 64'
LAST, FIRST = 1, 0


@pytest.mark.parametrize(
    ("outer", "stage"),
    [
        pytest.param(LOCAL, LAST, id="local-last"),
        pytest.param(SYNCHRONOUS, LAST, id="synchronous-last"),
        pytest.param(SYNCHRONOUS, FIRST, id="synchronous-first"),
    ],
)
def test_a_peer_of_another_stage_restores_one_that_lost_all_replicas(tmp_path: Path, outer: str, stage: int) -> None:
    with children() as group:
        cluster, started = begun(tmp_path, group, outer, peers=4)
        progress = cluster.progress
        kept = lose(cluster, started, stage)
        cluster.wait(120, "a peer moves", lambda: bool(progress.moves))
        ((mover, _, move),) = progress.moves
        assert (move.source, move.target, move.reason) == (1 - stage, stage, "no peer serves it")
        (stays,) = [child for child in kept if child.name != mover]
        cluster.wait(30, "the other says what it waits for", lambda: waits_for(cluster, stays) == stage)
        cluster.wait(120, "rounds go on", cluster.rounds_from_now(3))
        assert len(progress.moves) == 1, "one peer moved, and the other stayed"
        check(cluster)


def test_a_newcomer_restores_a_synchronous_stage_that_lost_its_only_replica(tmp_path: Path) -> None:
    with children() as group:
        cluster, started = begun(tmp_path, group, SYNCHRONOUS, peers=2)
        (kept,) = lose(cluster, started, LAST)
        cluster.wait(120, "the other says what it waits for", lambda: waits_for(cluster, kept) == LAST)
        assert not cluster.progress.moves, "the last replica of its stage"
        added = cluster.add(3)
        cluster.wait(180, "rounds go on", cluster.rounds_from_now(3))
        assert cluster.progress.peer(added.name).claims.stage == LAST
        check(cluster)


def begun(home: Path, group: Children, outer: str, peers: int) -> tuple[LocalCluster, list[ChildPeer]]:
    """A run of two stages that has committed a few rounds, and its peers, half of them in each."""
    (home / "run.toml").write_text(RUN.replace(f"rounds = {FEW}", f"rounds = {ROUNDS}").replace(LOCAL, outer))
    progress = Progress("test", keeps_all=True, stages=2)
    cluster = LocalCluster(home, ROUNDS, group, progress, lambda: None)
    cluster.begin()
    started: list[ChildPeer] = []
    for number in range(1, peers + 1):  # those that come at once may not see each other in time, and end 3 to 1
        started.append(cluster.join(number))
        cluster.wait(90, "it has a stage", lambda: None not in stages_of(cluster, started))
    spread = {FIRST: peers // 2, LAST: peers // 2}
    cluster.wait(180, "half of the peers are in each", lambda: Counter(stages_of(cluster, started)) == spread)
    cluster.wait(180, "both stages have committed three rounds more", cluster.rounds_from_now(3))
    return cluster, started


def lose(cluster: LocalCluster, started: list[ChildPeer], stage: int) -> list[ChildPeer]:
    """Kill all replicas of `stage`, once the others keep a commit of it; these."""
    kept = [child for child in started if cluster.progress.peer(child.name).claims.stage != stage]
    cluster.wait(60, "the stage is kept by the other", lambda: all(_keeps(child, stage) for child in kept))
    for child in started:
        if child not in kept:
            cluster.kill(child)
    return kept


def waits_for(cluster: LocalCluster, child: ChildPeer) -> int | None:
    """The stage that it says it waits for."""
    phase = cluster.progress.peer(child.name).claims.phase
    return int(phase.removeprefix("waiting for stage ")) if phase.startswith("waiting for stage ") else None


def check(cluster: LocalCluster) -> None:
    totals = cluster.progress.audit_trail.totals.values()
    assert sum(each.of("completed") for each in totals) > 0
    heads: dict[tuple[int | None, int, int], set[str]] = {}
    for commits in cluster.progress.commits.values():
        for commit in commits.values():
            heads.setdefault((commit.stage, commit.term, commit.round), set()).add(commit.state_hash)
    assert all(len(states) == 1 for states in heads.values()), "one state a stage and round"


def _keeps(child: ChildPeer, stage: int) -> bool:
    return any((child.home / f"stage-{stage}" / "checkpoints").glob("*-round-*"))
