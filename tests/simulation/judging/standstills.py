"""Histories of groups that stand still, each with a neighbour that holds and differs in one thing."""

from __future__ import annotations

from swarm.protocol.head import Head
from tests.simulation.aftermath import Hope, Left
from tests.simulation.disk import Image
from tests.simulation.judging.stage import Stage
from tests.simulation.judging.votes import broken
from tests.simulation.liveness import NOTICED, PERSON_S, SAFE_S, STEPS_MAX
from tests.simulation.tensors import GENESIS


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


def left_at(stage: Stage, where: dict[str, Head]) -> None:
    """Heal a group of which these peers stand there, and let time pass."""
    for peer, head in where.items():
        stage.stand(peer, head)
    stage.world.now = stage.world.heals_at
    stage.world.liveness.begin()
    stage.world.now += SAFE_S
    stage.world.liveness.is_reached()
    stage.world.liveness.check()


@broken("13 liveness: .* last fault: A:.* B:")
def a_quorum_without_its_coordinator(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    left_at(stage, dict.fromkeys("AB" if breaks else "A", start))


@broken("13 liveness: .* last fault: A:.* B:")
def a_quorum_without_its_coordinator_and_without_the_state(breaks: bool) -> None:
    stage = Stage()
    one = stage.round(stage.begun(), "AB")
    for peer in "" if breaks else "AB":
        stage.machine(peer).committed = stage.machine(peer).candidate = b""
        stage.machine(peer).disk.synced = Image()
    left_at(stage, dict.fromkeys("AB", one))


@broken("13 liveness: .* last fault: A:")
def a_required_group_that_stands_still(breaks: bool) -> None:
    stage = Stage(mode="required")
    start = stage.begun()
    left_at(stage, dict.fromkeys("WABC" if breaks else "ABC", start))


@broken("13 liveness: .* last fault: A:")
def as_many_peers_as_begin_a_group(breaks: bool) -> None:
    stage = Stage()
    left_at(stage, dict.fromkeys("WABC" if breaks else "WAB", GENESIS))


@broken("13 liveness: .* last fault: A:")
def fewer_peers_of_a_group_that_has_begun(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    left_at(stage, {"W": start if breaks else GENESIS, "A": GENESIS, "B": GENESIS})


@broken("13 liveness: .* last fault: A:")
def a_start_that_was_not_overtaken(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.round(start, "A")
    second = stage.commit("B", stage.start(start))
    left_at(stage, {"A": start if breaks else one, "B": second, "C": second})


@broken("13 liveness: .* last fault: A:")
def a_round_that_was_committed_after_longer_ones(breaks: bool) -> None:
    """A is at a later round of the term before; B and C have ended a round of the new one, or stand at its start."""
    stage = Stage()
    start = stage.begun()
    two = stage.round(stage.round(start, "A"), "A")
    second = stage.commit("BC", stage.start(start))
    one = stage.round(second, "BC", "second", voters="BC")
    left_at(stage, {"A": two, **dict.fromkeys("BC", one if breaks else second)})


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
