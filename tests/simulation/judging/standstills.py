"""Histories of groups that stand still, each with a neighbour that holds and differs in one thing."""

from __future__ import annotations

from swarm.protocol.head import Head
from tests.simulation.aftermath import Hope, Left
from tests.simulation.judging.stage import Stage
from tests.simulation.judging.votes import broken
from tests.simulation.liveness import NOTICED, PERSON_S, SAFE_S, STEPS_MAX


def healed(peers: str = "WABC", hope: Hope | None = None) -> tuple[Stage, Head]:
    """Return a group whose faults are over; with a hope, only these peers are healed."""
    stage = Stage()
    start = stage.begun()
    stage.stand("WABC", start)
    if hope is not None:
        stage.world.liveness.left = Left(frozenset(peers), hope)
    stage.world.now = stage.world.heals_at
    stage.world.liveness.begin()
    return stage, start


def goes_on(stage: Stage, start: Head, rounds: int = 2, peers: str = "ABC") -> None:
    """Let these peers stand so many rounds on, some seconds later."""
    for _ in range(rounds):
        start = stage.round(start, peers)
    stage.stand(peers, start)
    stage.world.now += SAFE_S
    stage.world.liveness.is_reached()


def stands_still(stage: Stage) -> None:
    """Let time pass until the operator, whom nobody has told, acts."""
    stage.world.advance(stage.world.now + (NOTICED + 1.5) * PERSON_S)


@broken("13 liveness: 60 s after the last fault: A:")
def a_group_that_ends_one_round(breaks: bool) -> None:
    stage, start = healed()
    goes_on(stage, start, rounds=1 if breaks else 2)
    stage.world.liveness.check()


@broken("13 liveness: 60 s after the last fault: A:")
def a_group_that_leaves_one_behind(breaks: bool) -> None:
    stage, start = healed()
    goes_on(stage, start, rounds=2, peers="AB" if breaks else "ABC")
    stage.world.liveness.check()


@broken("13 told: the group stood still")
def a_standstill_of_which_nobody_is_told(breaks: bool) -> None:
    stage, start = healed()
    if not breaks:
        stage.world.liveness.told("quorum_lost")
    stands_still(stage)
    goes_on(stage, start)
    stage.world.liveness.check()


@broken("13 told: no state is left")
def lost_weights_of_which_nobody_is_told(breaks: bool) -> None:
    stage, _ = healed("WA", "lost")
    if not breaks:
        stage.world.liveness.told("regroup_failed")
    stage.world.liveness.check()


@broken("13 told: those that are left stood still")
def a_standstill_of_the_rest_of_which_nobody_is_told(breaks: bool) -> None:
    stage, start = healed("WAB", "operator")
    if not breaks:
        stage.world.liveness.told("quorum_lost")
    stands_still(stage)
    goes_on(stage, start, peers="AB")
    stage.world.liveness.check()


@broken("13 liveness: [0-9]+ steps since the last fault")
def more_steps_than_a_rest_needs(breaks: bool) -> None:
    stage, start = healed("WAB", "alone")
    goes_on(stage, start, peers="AB")
    stage.world.steps += STEPS_MAX + (1 if breaks else 0)
    stage.world.liveness.check()


@broken("13 liveness: .*A B W can go on")
def a_rest_that_does_not_go_on(breaks: bool) -> None:
    stage, start = healed("WAB", "alone")
    goes_on(stage, start, rounds=1 if breaks else 2, peers="AB")
    stage.world.liveness.check()


@broken("13 liveness: .*A B W can go on")
def a_rest_that_could_go_on_with_its_operator(breaks: bool) -> None:
    stage, _ = healed("WAB", "operator" if breaks else "open")
    stage.world.now += SAFE_S
    stage.world.liveness.is_reached()
    stage.world.liveness.check()
