"""Histories of members, learners, batches and slices, each with a neighbour that holds and differs in one thing."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from swarm.protocol.agreement import messages as msg
from swarm.protocol.head import Absence, Head, Learner, Member
from swarm.protocol.ledger import Ledger
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from tests.simulation.judging.stage import Stage, member
from tests.simulation.judging.votes import broken
from tests.simulation.tensors import SCHEDULE, State


def members(peers: str) -> tuple[Member, ...]:
    return tuple(member(peer) for peer in peers)


def learning(stage: Stage, peers: str, merged: int = 0) -> tuple[Learner, ...]:
    """Let these peers ask to join, and return them as learners."""
    for peer in peers:
        stage.sign(peer, "agreement.join", msg.JoinBody(b"", member(peer)))
    return tuple(Learner(member(peer), merged) for peer in peers)


def led_by(head: Head, attempt: int = 0) -> Member:
    """Return the leader of an attempt after a head."""
    return head.members[(int.from_bytes(head.hash[:8], "big") + attempt) % len(head.members)]


# -- who comes in ------------------------------------------------------------------------------------------------------


@broken("10 electorate: .* came in unearned")
def a_member_that_has_done_nothing(breaks: bool) -> None:
    stage = Stage(joiners=2)
    one = stage.round(stage.begun(), learners=learning(stage, "a", 0 if breaks else 1))
    stage.round(one, members=members("ABCa"))


@broken("10 electorate: .* came in unearned")
def a_member_that_was_no_learner(breaks: bool) -> None:
    stage = Stage(joiners=2)
    one = stage.round(stage.begun(), learners=learning(stage, "a", 1))
    stage.round(one, members=members("ABCb" if breaks else "ABCa"))


@broken("10 electorate: .* came in unearned")
def more_members_at_once_than_a_minority(breaks: bool) -> None:
    stage = Stage(joiners=2)
    one = stage.round(stage.begun(), learners=learning(stage, "a", 1))
    two = stage.round(one, learners=(*one.learners, *learning(stage, "b", 1)))
    stage.round(two, members=members("ABCab" if breaks else "ABCa"))


@broken("10 electorate: .* 2 newcomers came in at once")
def more_learners_at_once_than_a_minority(breaks: bool) -> None:
    stage = Stage(joiners=2)
    stage.round(stage.begun(), learners=learning(stage, "ab" if breaks else "a"))


@broken("10 electorate: .* has not asked to join")
def a_learner_that_has_not_asked(breaks: bool) -> None:
    stage = Stage(joiners=2)
    if not breaks:
        learning(stage, "a")
    stage.round(stage.begun(), learners=(Learner(member("a"), 0),))


@broken("10 electorate: .* more than max_peers")
def more_peers_than_the_run_has_room_for(breaks: bool) -> None:
    stage = Stage(1, joiners=5)
    head = stage.begun("WA")
    for count in range(1, 6 if breaks else 5):
        head = stage.round(head, voters="AW", learners=learning(stage, "abcde"[:count]))


@broken("10 electorate: .* one invite has two votes")
def two_peers_of_one_invite(breaks: bool) -> None:
    stage = Stage(lying_joiners=2)
    one = stage.round(stage.begun(), learners=learning(stage, "a"))
    stage.round(one, learners=(*one.learners, *(learning(stage, "b") if breaks else ())))


@broken("10 electorate: .* one peer has two votes")
def two_members_of_one_peer(breaks: bool) -> None:
    stage = Stage()
    again = Member("C", "2")
    stage.sign("C", "agreement.join", msg.JoinBody(b"", again))
    one = stage.round(stage.begun(), learners=(Learner(again, 1),))
    stage.round(one, members=(*members("ABC" if breaks else "AB"), again))


# -- who leaves --------------------------------------------------------------------------------------------------------


def away(stage: Stage, rounds: int, same_leader: bool) -> tuple[Head, Absence]:
    """Return a head at which C is away for so many rounds, last under the leader of the next round or another one."""
    head, other = stage.begun(), 0
    while True:
        found = stage.after(head, str(other))
        leader = led_by(found)
        then = leader if same_leader else next(one for one in found.members if one != leader)
        absence = Absence(member("C"), rounds, then)
        found = stage.after(head, str(other), absent=(absence,))
        if (led_by(found) == then) == same_leader:
            return stage.commit("A", stage.certified(found)), absence
        other += 1


@broken("10 electorate: .* was dropped at its first absence")
def a_member_dropped_at_its_first_absence(breaks: bool) -> None:
    stage = Stage()
    head = stage.begun() if breaks else away(stage, 2, same_leader=False)[0]
    stage.round(head, members=members("AB"))


@broken("10 electorate: .* was dropped by one leader")
def a_member_dropped_by_one_leader(breaks: bool) -> None:
    stage = Stage()
    stage.round(away(stage, 1, same_leader=breaks)[0], members=members("AB"))


@broken("10 electorate: .* was dropped by one leader")
def a_member_dropped_by_one_leader_after_another(breaks: bool) -> None:
    stage = Stage()
    stage.round(away(stage, 1 if breaks else 2, same_leader=True)[0], members=members("AB"))


@broken("10 electorate: .* was dropped by one leader")
def an_honest_member_dropped_beside_a_liar(breaks: bool) -> None:
    """Proofs convict liars at once."""
    stage = Stage(liars=0 if breaks else 1)
    stage.round(away(stage, 1, same_leader=True)[0], members=members("AB"))


@broken("10 electorate: .* was dropped at its first absence")
def an_honest_member_dropped_like_a_liar(breaks: bool) -> None:
    stage = Stage(liars=0 if breaks else 1)
    stage.round(stage.begun(), members=members("AB"))


@broken("10 electorate: .* was dropped at its first absence")
def a_member_replaced_by_another_peer(breaks: bool) -> None:
    """Its own new incarnation may take its place."""
    stage = Stage(joiners=1)
    new = Member("a" if breaks else "C", "2")
    stage.sign(new.peer, "agreement.join", msg.JoinBody(b"", new))
    one = stage.round(stage.begun(), learners=(Learner(new, 1),))
    stage.round(one, members=(*members("AB"), new))


# -- batches and slices ------------------------------------------------------------------------------------------------


def batch(stage: Stage, before: Head, samples: tuple[tuple[int, int], ...], cursor: int = 24, **changes: Any) -> None:
    """Commit a round of a synchronous pipeline that has merged these samples."""
    ledger = Ledger(cursor, tuple(changes.pop("returned", ())))
    tokens = changes.pop("counted", 24) * SCHEDULE.seq_len
    head = stage.after(before, ledger=ledger, tokens=tokens)
    stage.world.tensors.states[head.state_hash] = State(samples, **changes)
    stage.commit("A", stage.certified(head))


@broken("8 no half round: round 1 has merged")
def half_a_batch(breaks: bool) -> None:
    stage = Stage(batch=24)
    if breaks:
        batch(stage, stage.begun(), ((0, 20),), returned=((20, 24),))
    else:
        batch(stage, stage.begun(), ((0, 24),))


@broken("8 no half round: round 1 has merged")
def samples_beyond_the_batch(breaks: bool) -> None:
    stage = Stage(batch=24)
    if breaks:
        batch(stage, stage.begun(), ((0, 24),), cursor=28, returned=((24, 28),))
    else:
        batch(stage, stage.begun(), ((0, 24),))


@broken("8 no half round: round 1 counts the tokens")
def tokens_of_half_a_batch(breaks: bool) -> None:
    stage = Stage(batch=24)
    batch(stage, stage.begun(), ((0, 24),), counted=20 if breaks else 24)


@broken("5 weights: round 1 has made-up weights in a slice of [AB]")
def made_up_weights_of_an_honest_owner(breaks: bool) -> None:
    """All own slices in turn; C lies."""
    stage = Stage(liars=1)
    one = stage.after(stage.begun())
    signed = tuple(
        stage.sign(peer, CONTRIBUTION_KIND, Contribution(one.previous, b"", member(peer), 1, 1, 1.0, (), ()))
        for peer in "ABC"
    )
    tensors = stage.world.tensors
    results = tuple(bytes([index]) * 32 for index in range(3))
    tensors.results[one.state_hash] = results
    tensors.rosters[one.state_hash] = stage.sign("A", "agreement.roster", msg.RosterBody(one.previous, 0, b"", signed))
    first = int.from_bytes(blake3(one.previous).digest()[:8], "big")
    owners = ["ABC"[(first + index) % 3] for index in range(3)]
    tensors.forged.add(results[owners.index("A" if breaks else "C")])
    stage.commit("A", stage.certified(one))
