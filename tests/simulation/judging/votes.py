"""Histories of votes, disks and certificates, each with a neighbour that holds and differs in one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from swarm.protocol.agreement import actions
from swarm.protocol.agreement import messages as msg
from tests.simulation.disk import Image
from tests.simulation.invariants import SENDS_PER_S
from tests.simulation.judging.stage import Stage
from tests.simulation.tensors import State


@dataclass(frozen=True)
class History:
    """A history that must be found broken, and its neighbour (`breaks` is False), which holds."""

    verdict: str
    """What the judge says, as a regular expression."""
    play: Callable[[bool], None]

    @property
    def name(self) -> str:
        return self.play.__name__


HISTORIES: Final[list[History]] = []


def broken(verdict: str) -> Callable[[Callable[[bool], None]], Callable[[bool], None]]:
    """Add a history."""

    def add(play: Callable[[bool], None]) -> Callable[[bool], None]:
        HISTORIES.append(History(verdict, play))
        return play

    return add


# -- votes and promises ------------------------------------------------------------------------------------------------


@broken("6 votes: .* votes twice")
def two_votes_in_one_attempt(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.vote("A", start, stage.after(start))
    stage.vote("A", start, stage.after(start, "another"), attempt=0 if breaks else 1)


@broken("6 votes: .* votes twice")
def the_witness_votes_twice(breaks: bool) -> None:
    stage = Stage(2)
    start = stage.begun("WAB")
    stage.machine("W").restored = not breaks  # declared: it may have forgotten
    stage.say_vote("W", start, stage.after(start))
    stage.say_vote("W", start, stage.after(start, "another"))


@broken("6 votes: .* votes below its promise")
def a_vote_below_a_promise(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.promise("A", start, 2)
    stage.vote("A", start, stage.after(start), attempt=1 if breaks else 2)


@broken("6 votes: .* votes below its promise")
def a_vote_below_a_promise_that_another_message_repeats(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.promise("A", start, 2)
    stage.promise("A", start, 1)
    stage.vote("A", start, stage.after(start), attempt=1 if breaks else 3)


@broken("6 votes: .* hides its vote in 1")
def a_promise_without_the_vote_before(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    value = stage.after(start)
    stage.vote("A", start, value, attempt=1)
    stage.promise("A", start, 2, None if breaks else (1, value))


@broken("6 votes: .* hides its vote in 1")
def a_promise_with_an_older_vote(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    first, second = stage.after(start), stage.after(start, "second")
    stage.vote("A", start, first, attempt=0)
    stage.vote("A", start, second, attempt=1)
    stage.promise("A", start, 2, (0, first) if breaks else (1, second))


@broken("6 votes: A promises before")
def a_promise_before_the_disk(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    if not breaks:
        stage.write("A", start, None, promised=1)
    stage.say_promise("A", start, 1)


@broken("6 votes: A promises before")
def a_promise_beside_a_lower_one_on_disk(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.write("A", start, None, promised=1 if breaks else 2)
    stage.say_promise("A", start, 2)


@broken("7 durability: A votes before")
def a_vote_before_the_disk(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    value = stage.after(start)
    if not breaks:
        stage.write("A", start, value)
    stage.say_vote("A", start, value)


@broken("7 durability: A votes before")
def a_vote_beside_another_value_on_disk(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    value = stage.after(start)
    stage.write("A", start, stage.after(start, "another") if breaks else value)
    stage.say_vote("A", start, value)


@broken("7 durability: A votes before")
def a_vote_beside_an_earlier_attempt_on_disk(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    value = stage.after(start)
    stage.write("A", start, value, voted=0 if breaks else 2)
    stage.say_vote("A", start, value, attempt=1)


@broken("7 durability: A votes for a state")
def a_vote_for_a_state_that_is_not_on_disk(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    value = stage.after(start)
    stage.write("A", start, value)
    stage.machine("A").disk.synced.voted = b"" if breaks else value.state_hash
    stage.say_vote("A", start, value)


@broken("weights: A writes of a state")
def a_record_of_a_state_that_is_not_there(breaks: bool) -> None:
    stage = Stage()
    value = stage.after(stage.begun())
    stage.machine("A").candidate = b"" if breaks else value.state_hash
    stage.machine("A")._do(actions.Persist(1, "ballot", b"", value.state_hash))


# -- commits -----------------------------------------------------------------------------------------------------------


@broken("4 monotone: A commits a head with the certificate of another")
def the_certificate_of_another_head(breaks: bool) -> None:
    stage = Stage()
    stage.commit("A", stage.certified(stage.after(stage.begun())), inner_step=9 if breaks else 0)


@broken("5 weights: A stands at round 1 without")
def a_head_without_its_state(breaks: bool) -> None:
    stage = Stage()
    stage.commit("A", stage.certified(stage.after(stage.begun())), held=not breaks)


@broken("4 monotone: A goes back")
def a_head_below_the_last_one(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    stage.commit("AB", stage.certified(one))
    stage.round(one, "A")
    if not breaks:
        stage.judge.wiped("A")  # another disk: it begins again
    stage.commit("A", stage.certified(one))


@broken("4 monotone: A goes back")
def a_head_twice(breaks: bool) -> None:
    stage = Stage()
    one = stage.certified(stage.after(stage.begun()))
    stage.commit("A", one)
    stage.commit("A" if breaks else "B", one)


@broken("7 durability: A commits before")
def a_commit_before_the_disk(breaks: bool) -> None:
    stage = Stage()
    stage.commit("A", stage.certified(stage.after(stage.begun())), on_disk=not breaks)


@broken("7 durability: A commits before")
def a_commit_on_an_empty_disk(breaks: bool) -> None:
    stage = Stage()
    link = stage.certified(stage.after(stage.begun()))
    stage.machine("A").disk.synced = Image()
    stage.commit("A", link, on_disk=not breaks)


@broken("1 agreement")
def two_commits_after_one_head(breaks: bool) -> None:
    """At two positions, as a start of the same base would be: only the head before says that they fork."""
    stage = Stage()
    start = stage.begun()
    one = stage.round(start, "A")
    if breaks:
        stage.round(start, "C", "another", voters="BC", round=9)
    else:
        stage.round(one, "C", "another", voters="BC")


@broken("1 agreement")
def two_commits_at_one_position(breaks: bool) -> None:
    """Each follows another head."""
    stage = Stage()
    two = stage.round(stage.round(stage.begun()))
    stage.round(two, "C", round=2 if breaks else 3)


@broken("9 counted once")
def a_ledger_beside_its_state(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    stage.world.tensors.states[one.state_hash] = State(((0, 7 if breaks else 8),))
    stage.commit("A", stage.certified(one))


@broken("9 counted once")
def a_sample_merged_twice(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    stage.world.tensors.states[one.state_hash] = State(((0, 8),), doubled=breaks)
    stage.commit("A", stage.certified(one))


@broken("9 counted once")
def a_state_that_nobody_has_built(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    if breaks:
        del stage.world.tensors.states[one.state_hash]
    stage.commit("A", stage.certified(one))


@broken("2 lineage: round 2 of a run with 1")
def a_round_of_a_complete_run(breaks: bool) -> None:
    stage = Stage(rounds=1 if breaks else 2)
    stage.round(stage.round(stage.begun()))


@broken("14 bounds: A sent")
def too_many_messages(breaks: bool) -> None:
    stage = Stage()
    most = 20 * SENDS_PER_S * len(stage.world.machines)
    for _ in range(most + breaks):
        stage.judge.sent(stage.machine("A"), "B", msg.AskChainMessage(()))
    stage.judge.at_end()


@broken("12 honest is never penalized: A accuses B")
def an_honest_peer_is_accused(breaks: bool) -> None:
    stage = Stage(liars=1)
    stage.judge.accused(stage.machine("A"), actions.Accuse("B" if breaks else "C", "it votes twice"))


@broken("12 honest is never penalized: A accuses another")
def a_peer_that_is_not_there_is_accused(breaks: bool) -> None:
    stage = Stage(liars=1)
    stage.judge.accused(stage.machine("A"), actions.Accuse("another" if breaks else "C", "it votes twice"))


@broken("12 honest is never penalized: A accuses B")
def a_peer_that_has_forgotten_is_accused(breaks: bool) -> None:
    stage = Stage()
    stage.machine("B").restored = not breaks
    stage.judge.accused(stage.machine("A"), actions.Accuse("B", "it votes twice"))
