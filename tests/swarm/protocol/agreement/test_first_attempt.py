"""The first attempt after a head goes without promises: nothing can have been accepted below it."""

from __future__ import annotations

import msgspec
import pytest

from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import attempt_of, leader_of
from swarm.protocol.plan import WorkPlan
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes


def at_round(group: GroupOfNodes, round: int) -> str:
    """Run until all stand at that round; return the leader of the first attempt after it."""
    group.run_to(round)
    head = group.head("A")
    return leader_of(head, head.hash, 0).peer


def planned(group: GroupOfNodes, attempt: int) -> tuple[str, WorkPlan]:
    """Run until the plan of that attempt is sent; return its leader and the plan."""
    first = len(group.sent)

    def found() -> list[tuple[str, WorkPlan]]:
        plans = [(s, m) for s, _, m in group.sent[first:] if isinstance(m, msg.PlanMessage) and m.attempt == attempt]
        return [(source, msgspec.msgpack.decode(message.plan.body, type=WorkPlan)) for source, message in plans]

    group.run(60.0, lambda: bool(found()))
    return found()[0]


@pytest.mark.parametrize("peers, mode", [("ABC", "witness"), ("ABCD", "witness"), ("AB", "required")])
def test_a_round_without_faults_takes_no_promise(peers: str, mode: str) -> None:
    """The first round of a term is begun by a start, which no voter has voted for; all later ones by votes."""
    group = GroupOfNodes(peers, mode=mode)
    group.run_to(1)
    first = len(group.sent)
    group.run_to(5)
    asked = (msg.PrepareMessage, msg.PromiseMessage)
    assert not any(isinstance(message, asked) for _, _, message in group.sent[first:])
    proposals = [m for _, _, m in group.sent[first:] if isinstance(m, msg.ProposalMessage)]
    assert proposals and not any(message.promises for message in proposals) and not group.accusations()


def test_a_voter_that_has_promised_a_later_attempt_refuses_the_first() -> None:
    group = GroupOfNodes("ABC")
    first = at_round(group, 1)
    head = group.head("A")
    victim, other = sorted(set("ABC") - {first})
    later = attempt_of(head, head.hash, group.member(other), 1)
    node = group.machines[victim].node
    node._round._timeouts.expire()  # its leader's time is over
    while node._round._timeouts.leader.peer != other:
        node._round._timeouts.expire()
    group.event(victim, events.Received(other, msg.PrepareMessage(head.hash, later, position_of(head))))
    assert node._round.instance.ballot.promised == later
    _, _, message = group.run_until_sent(msg.ProposalMessage)
    group.give(victim, message, first)
    votes = {body.attempt for body in bodies_of(group, victim) if body.head == head.hash}
    assert 0 not in votes


def test_a_value_accepted_in_the_first_attempt_is_forced_in_later_ones() -> None:
    group = GroupOfNodes("ABC")
    at_round(group, 2)
    leader, voter, third, message = group.lose_leader_after_votes()
    assert msgspec.msgpack.decode(message.proposal.body, type=msg.ProposalBody).attempt == 0 and not message.promises
    group.heal()
    group.run_to(4, voter + third)
    chosen = {head.hash for head in group.machines[third].committed if head.round == 3}
    assert chosen == {message.value.hash} and leader not in (voter, third)


def test_a_leader_that_has_restarted_leads_no_first_attempt() -> None:
    """Its disk does not say whether its process before has led it, and with which value."""
    group = GroupOfNodes("ABC")
    leader = at_round(group, 1)
    source, plan = planned(group, 0)
    assert source == leader and plan.attempt == 0
    group.crash(leader)
    group.start(leader)
    first = len(group.sent)
    group.run_to(3)
    again = [
        m.attempt
        for source, _, m in group.sent[first:]
        if source == leader and isinstance(m, msg.PrepareMessage | msg.PlanMessage) and m.head == plan.head
    ]
    assert 0 not in again and not group.accusations()


@pytest.mark.parametrize("delay_s, comes", [(0.3, True), (2.0, False)])
def test_a_leader_waits_a_moment_for_members_that_have_not_voted(delay_s: float, comes: bool) -> None:
    """One that comes within it is planned for; one that does not costs no more than that moment."""
    for late in "ABC":  # until another one leads both this round and the next
        group = GroupOfNodes("ABC")
        leader = at_round(group, 2)
        group.build = lambda peer, state, late=late: (delay_s if peer == late else 0.05, state)  # type: ignore[misc]
        group.run(60.0, lambda group=group, leader=leader: group.round(leader) == 3)  # type: ignore[misc]
        head = group.head(leader)
        if late not in (leader, leader_of(head, head.hash, 0).peer):
            break
    began = group.now
    _, plan = planned(group, 0)
    assert plan.head == head.hash and group.now - began < 0.6
    assert (group.member(late) in {a.member for a in plan.assignments}) == comes
    group.run_to(4)


def test_a_late_vote_is_not_answered_and_a_repeated_one_is() -> None:
    """A voter that repeats its vote for where this node stands lacks the votes of the others."""
    group = GroupOfNodes("ABC")
    group.lost = lambda source, target, message: isinstance(message, msg.VoteMessage) and source == "C"
    group.run_to(2)
    head = group.head("A")
    cast = {message for _, _, message in group.sent if isinstance(message, msg.VoteMessage)}
    (vote,) = (message for message in cast if voter_for(message, head.hash) == "C")
    told = [[a.message for a in group.give("A", vote, "C") if isinstance(a, actions.Send)] for _ in range(2)]
    assert not told[0] and [m.head for m in told[1] if isinstance(m, msg.StatusMessage)] == [head.hash]


def test_newcomers_are_asked_whether_they_come() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.start("D")
    first = len(group.sent)
    group.run(60.0, lambda: any(learner.member.peer == "D" for learner in group.head("A").learners))
    asked = [t for _, t, m in group.sent[first:] if isinstance(m, msg.PrepareMessage) and m.attempt == 0]
    assert "D" in asked
    group.run(60.0, lambda: any(m.peer == "D" for m in group.head("A").members))
    group.run_to(group.round("A") + 2, "ABCD")


def test_the_coordinator_is_in_no_plan_although_it_votes() -> None:
    """It has no weights; its vote shows that it is here all the same."""
    group = GroupOfNodes("AB")
    group.run_to(1)
    group.isolate("B")
    group.run(60.0, lambda: group.round("A") >= 3)
    group.heal()
    group.run_to(6)
    plans = [m.plan.body for _, _, m in group.sent if isinstance(m, msg.PlanMessage)]
    planned_for = {a.member.peer for body in plans for a in msgspec.msgpack.decode(body, type=WorkPlan).assignments}
    assert planned_for == {"A", "B"} and bodies_of(group, COORDINATOR)


def voter_for(message: msg.VoteMessage, value: bytes) -> str:
    """Return the peer that votes for that value with this message; empty if it is a vote for another."""
    body = msgspec.msgpack.decode(message.vote.body, type=msg.VoteBody)
    return body.voter.peer if body.value == value else ""


def bodies_of(group: GroupOfNodes, voter: str) -> list[msg.VoteBody]:
    found = [body for signer, kind, body in sorted(group.table.signed) if (signer, kind) == (voter, evidence.VOTE)]
    return [msgspec.msgpack.decode(body, type=msg.VoteBody) for body in found]


def test_an_owners_signed_results_go_to_the_leader_alone() -> None:
    """They went to all: at 16 peers 331 messages a round."""
    group = GroupOfNodes("ABCD")
    group.run_to(4)
    heads = {head.hash: head for head in group.machines["A"].committed}
    sent = [(target, message) for _, target, message in group.sent if isinstance(message, msg.ResultsMessage)]
    assert len(sent) >= 3 * 4
    for target, message in sent:
        body = msgspec.msgpack.decode(message.results.body, type=msg.ResultsBody)
        assert target == leader_of(heads[message.head], message.head, body.attempt).peer


def test_a_member_that_hears_of_no_proposal_commits_what_it_has_built() -> None:
    """The votes of the others certify the state that the owners' slices lead it to: no peer sends it whole."""
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    group.build = lambda peer, state: (0.3 if peer == "D" else 0.05, state)
    group.lost = lambda source, target, message: target == "D" and isinstance(message, msg.ProposalMessage)
    group.run_to(6)
    assert not group.fetches and group.head("A").term == 1


def test_a_member_that_has_received_other_slices_builds_again_from_those_that_are_proposed() -> None:
    """An owner sends one what it has not signed for."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.received = lambda peer, name: bytes(32) if peer == "B" else name
    group.run_to(4)
    assert not group.fetches and not group.accusations() and group.head("B").term == 1
