"""Histories of certificates, each with a neighbour that holds and differs in one thing."""

from __future__ import annotations

from swarm.protocol.agreement import messages as msg
from tests.simulation.judging.stage import Stage, member
from tests.simulation.judging.votes import broken
from tests.simulation.tensors import GENESIS


@broken("11 not by hearsay")
def votes_of_fewer_than_a_quorum(breaks: bool) -> None:
    stage = Stage()
    stage.round(stage.begun(), voters="A" if breaks else "AC")


@broken("11 not by hearsay")
def half_of_four_votes(breaks: bool) -> None:
    stage = Stage(4)
    stage.round(stage.begun("WABCD"), voters="AB" if breaks else "ABW")


@broken("11 not by hearsay")
def a_required_round_without_the_coordinator(breaks: bool) -> None:
    stage = Stage(mode="required")
    stage.round(stage.begun(), voters="ABC" if breaks else "ABW")


@broken("11 not by hearsay")
def a_required_round_of_a_minority(breaks: bool) -> None:
    stage = Stage(mode="required")
    stage.round(stage.begun(), voters="AW" if breaks else "BCW")


@broken("11 not by hearsay")
def votes_after_another_head(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.commit("A", stage.certified(stage.after(start), head=GENESIS.hash if breaks else start.hash))


@broken("11 not by hearsay")
def votes_for_another_value(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    stage.commit("A", stage.certified(one, value=GENESIS.hash if breaks else one.hash))


@broken("11 not by hearsay")
def votes_of_two_attempts(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    first, second = stage.certified(one, "A"), stage.certified(one, "B", attempt=1 if breaks else 0)
    stage.commit("A", msg.ChainLink(one, votes=(*first.votes, *second.votes)))


@broken("11 not by hearsay")
def a_vote_that_another_peer_has_signed(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun())
    body = msg.VoteBody(one.previous, 0, one.hash, member("B"))
    forged = stage.sign("C" if breaks else "B", "agreement.vote", body)
    stage.commit("A", msg.ChainLink(one, votes=(*stage.certified(one, "A").votes, forged)))
