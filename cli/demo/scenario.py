"""The scripts of a quickstart: which peers join, are killed, frozen or slow, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from cli.demo.child_processes import ChildPeer
from cli.demo.cluster import LocalCluster, choose_frozen

FREEZE_S: Final = 15.0  # longer than a group waits for a peer that does not answer
SLOW_S: Final = 40.0  # less than a peer stays at its stage in any case, so that none moves for it
AWAKE_AT_THE_END: Final = 3  # rounds: all others leave soon after the last one


@dataclass(frozen=True)
class Scenario:
    """What happened in a quickstart. The lists hold names of children."""

    children: Mapping[str, ChildPeer]
    killed: Sequence[str]
    added: Sequence[str]
    survivors: Sequence[str]
    """Children that must see the end of the run."""
    frozen: Sequence[str] = ()
    """Survivors that were frozen for a while."""
    marks: Mapping[int, str] = field(default_factory=dict)
    """Faults and additions by the round that was committed last."""


def play_whole(cluster: LocalCluster, peers: int) -> Scenario:
    """Play a run of the whole model: one peer joins and another one is killed."""
    cluster.begin()
    started = [cluster.join(number) for number in range(1, peers + 1)]
    progress, fault_round = cluster.progress, max(1, cluster.rounds // 3)
    added = _add_early(cluster, peers)

    def all_have_it() -> bool:  # of two members, one that dies as it commits takes that round with it
        return progress.round > fault_round or all(progress.peer(child.name).round >= fault_round for child in started)

    cluster.wait(None, f"round {fault_round} is committed", all_have_it)
    victim = started[1]
    cluster.kill(victim)
    return _end(cluster, started, [victim], [added])


def play_pipeline(cluster: LocalCluster, peers: int) -> Scenario:
    """Play a pipeline: one peer joins, one replica is killed, and one of another stage is frozen for a while. Before,
    another peer is slow for a while, where there are more than two for each stage."""
    cluster.begin()
    started = [cluster.join(number) for number in range(1, peers + 1)]
    progress, fault_round = cluster.progress, max(1, cluster.rounds // 4)
    near_end = cluster.rounds - AWAKE_AT_THE_END

    def stage_of(child: ChildPeer) -> int | None:
        return progress.peer(child.name).claims.stage

    def over(seconds: float) -> Callable[[], bool]:
        ends_at = time.monotonic() + seconds
        return lambda: time.monotonic() > ends_at or progress.round >= near_end

    cluster.wait(None, "every peer has a stage", lambda: all(stage_of(child) is not None for child in started))
    healthy = list(started)
    with ExitStack() as slowness:
        slow_enough = over(SLOW_S)
        if peers > 2 * len({stage_of(child) for child in started}):
            stages = {child.name: stage_of(child) for child in started}
            slow = cluster.children[choose_frozen(stages, stage_of(cluster.choose_victim(started)))]
            healthy.remove(slow)
            slowness.enter_context(cluster.slowed(slow))
        added = _add_early(cluster, peers)
        cluster.wait(None, f"every stage has committed round {fault_round}", lambda: progress.round >= fault_round)
        victim = cluster.choose_victim(healthy)
        cluster.kill(victim)
        cluster.wait(None, "another round is committed", cluster.rounds_from_now(1))
        if len(healthy) < len(started):
            cluster.wait(None, "it was slow for long enough", slow_enough)
    living = {child.name: stage_of(child) for child in healthy if child.alive}
    frozen = cluster.children[choose_frozen(living, stage_of(victim))]
    cluster.freeze(frozen)
    cluster.wait(None, "it is time to thaw", over(FREEZE_S))
    cluster.thaw(frozen)
    return _end(cluster, started, [victim], [added], [frozen])


def _add_early(cluster: LocalCluster, peers: int) -> ChildPeer:
    """Add a peer after round 1, early enough to take part: rounds do not wait for it."""
    cluster.wait(None, "round 1 is committed", lambda: cluster.progress.round >= 1)
    return cluster.add(peers + 1)


def _end(
    cluster: LocalCluster,
    started: Sequence[ChildPeer],
    killed: Sequence[ChildPeer],
    added: Sequence[ChildPeer],
    frozen: Sequence[ChildPeer] = (),
) -> Scenario:
    """Wait until all surviving peers have finished the run."""
    survivors = [child for child in (*started, *added) if child not in killed]
    cluster.wait(None, "all peers finish", lambda: not any(child.alive for child in survivors))

    def names(children: Sequence[ChildPeer]) -> list[str]:
        return [child.name for child in children]

    return Scenario(cluster.children, names(killed), names(added), names(survivors), names(frozen), cluster.marks)
