"""What befalls the peers of a quickstart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cli.demo.child_processes import ChildPeer
from cli.demo.cluster import LocalCluster, to_freeze

FREEZE_S: Final = 15.0  # longer than a group waits for whoever does not answer
AWAKE_AT_THE_END: Final = 3  # rounds: who still sleeps when a run ends is left behind by all that have its last round


@dataclass(frozen=True)
class Scenario:
    """Who was there and what befell them; lists hold child names. `survivors` must see the run's end; of these the
    `frozen` could do nothing for a while. `marks`: what happened, by the round that was committed last."""

    children: Mapping[str, ChildPeer]
    killed: Sequence[str]
    added: Sequence[str]
    survivors: Sequence[str]
    frozen: Sequence[str] = ()
    marks: Mapping[int, str] = field(default_factory=dict)


def play_whole(cluster: LocalCluster, peers: int) -> Scenario:
    """One peer joins and another one is killed."""
    cluster.begin()
    started = [cluster.join(number) for number in range(1, peers + 1)]
    progress, turn = cluster.progress, max(1, cluster.rounds // 3)
    added = _add_early(cluster, peers)

    def all_know() -> bool:  # of two members, one that dies as it commits takes that round with it
        return progress.round > turn or all(progress.row(child.name).round >= turn for child in started)

    cluster.wait(None, f"round {turn} is committed", all_know)
    victim = started[1]
    cluster.kill(victim)
    return _end(cluster, started, [victim], [added])


def play_pipeline(cluster: LocalCluster, peers: int) -> Scenario:
    """Another peer joins, one replica is killed, one of another stage is frozen and thaws later."""
    cluster.begin()
    started = [cluster.join(number) for number in range(1, peers + 1)]
    progress, turn = cluster.progress, max(1, cluster.rounds // 4)

    def stage_of(child: ChildPeer) -> int | None:
        return progress.row(child.name).stage

    cluster.wait(None, "every peer has a stage", lambda: all(stage_of(child) is not None for child in started))
    added = _add_early(cluster, peers)
    cluster.wait(None, f"every stage has committed round {turn}", lambda: progress.round >= turn)
    victim = cluster.spare(started)
    cluster.kill(victim)
    cluster.wait(None, "another round is committed", cluster.rounds_from_now(1))
    living = {child.name: stage_of(child) for child in started if child.alive}
    frozen = cluster.children[to_freeze(living, stage_of(victim))]
    cluster.freeze(frozen)
    thaws_at = time.monotonic() + FREEZE_S
    near_end = cluster.rounds - AWAKE_AT_THE_END
    cluster.wait(None, "it is time to thaw", lambda: time.monotonic() > thaws_at or progress.round >= near_end)
    cluster.thaw(frozen)
    return _end(cluster, started, [victim], [added], [frozen])


def _add_early(cluster: LocalCluster, peers: int) -> ChildPeer:
    """A peer that comes when the run is under way, and has most of it to get ready in: rounds do not wait for it."""
    cluster.wait(None, "round 1 is committed", lambda: cluster.progress.round >= 1)
    return cluster.add(peers + 1)


def _end(
    cluster: LocalCluster,
    started: Sequence[ChildPeer],
    killed: Sequence[ChildPeer],
    added: Sequence[ChildPeer],
    frozen: Sequence[ChildPeer] = (),
) -> Scenario:
    """Wait until all that are left have seen the run's end."""
    survivors = [child for child in (*started, *added) if child not in killed]
    cluster.wait(None, "all peers finish", lambda: not any(child.alive for child in survivors))

    def names(children: Sequence[ChildPeer]) -> list[str]:
        return [child.name for child in children]

    return Scenario(cluster.children, names(killed), names(added), names(survivors), names(frozen), cluster.marks)
