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


def play_whole(course: LocalCluster, peers: int) -> Scenario:
    """One peer joins and another one is killed."""
    course.begin()
    started = [course.join(number) for number in range(1, peers + 1)]
    progress, turn = course.progress, max(1, course.rounds // 3)
    added = _add_early(course, peers)

    def all_know() -> bool:  # of two members, one that dies as it commits takes that round with it
        return progress.round > turn or all(progress.row(child.name).round >= turn for child in started)

    course.wait(None, f"round {turn} is committed", all_know)
    victim = started[1]
    course.kill(victim)
    return _end(course, started, [victim], [added])


def play_pipeline(course: LocalCluster, peers: int) -> Scenario:
    """Another peer joins, one replica is killed, one of another stage is frozen and thaws later."""
    course.begin()
    started = [course.join(number) for number in range(1, peers + 1)]
    progress, turn = course.progress, max(1, course.rounds // 4)

    def stage_of(child: ChildPeer) -> int | None:
        return progress.row(child.name).stage

    course.wait(None, "every peer has a stage", lambda: all(stage_of(child) is not None for child in started))
    added = _add_early(course, peers)
    course.wait(None, f"every stage has committed round {turn}", lambda: progress.round >= turn)
    victim = course.spare(started)
    course.kill(victim)
    course.wait(None, "another round is committed", course.rounds_from_now(1))
    living = {child.name: stage_of(child) for child in started if child.alive}
    sleeper = course.children[to_freeze(living, stage_of(victim))]
    course.freeze(sleeper)
    thaws_at = time.monotonic() + FREEZE_S
    near_end = course.rounds - AWAKE_AT_THE_END
    course.wait(None, "it is time to thaw", lambda: time.monotonic() > thaws_at or progress.round >= near_end)
    course.thaw(sleeper)
    return _end(course, started, [victim], [added], [sleeper])


def _add_early(course: LocalCluster, peers: int) -> ChildPeer:
    """A peer that comes when the run is under way, and has most of it to get ready in: rounds do not wait for it."""
    course.wait(None, "round 1 is committed", lambda: course.progress.round >= 1)
    return course.add(peers + 1)


def _end(
    course: LocalCluster,
    started: Sequence[ChildPeer],
    killed: Sequence[ChildPeer],
    added: Sequence[ChildPeer],
    frozen: Sequence[ChildPeer] = (),
) -> Scenario:
    """Wait until all that are left have seen the run's end."""
    survivors = [child for child in (*started, *added) if child not in killed]
    course.wait(None, "all peers finish", lambda: not any(child.alive for child in survivors))

    def names(children: Sequence[ChildPeer]) -> list[str]:
        return [child.name for child in children]

    return Scenario(course.children, names(killed), names(added), names(survivors), names(frozen), course.marks)
