"""Whose turn it is: leaders that come back, voters that wait for different leaders, slow networks."""

from __future__ import annotations

import pytest

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.rules.electorate import attempt_of, leader_of
from swarm.protocol.agreement.work import Work
from tests.swarm.protocol.agreement.group import COORDINATOR, SCHEDULE, GroupOfNodes


def test_turns_grow_to_the_time_that_a_slow_network_takes() -> None:
    """A leader's call takes longer than a turn. With turns of one length each leader would be given up before the
    others hear of it, for ever."""
    group = GroupOfNodes("ABC", attempt_s=1.0, attempt_max_s=8.0, grace_s=3.0)
    group.run_to(1)
    group.delay_s = 1.3
    head = group.head("A")
    group.crash(leader_of(head, head.hash, 0).peer)
    alive = "".join(peer for peer in "ABC" if group.machines[peer].up)
    group.run(120.0, lambda: all(group.round(peer) > head.round + 1 for peer in alive))
    assert all(group.round(peer) > head.round + 1 for peer in alive)


def test_a_leader_that_was_down_is_waited_for_again() -> None:
    """Of five members two are gone for good. One that restarted had been given up while it was down, and was passed
    over until all others had had a turn."""
    group = GroupOfNodes("ABCDE")
    group.run_to(1)
    head = group.head("A")
    first = leader_of(head, head.hash, 0)
    others = sorted(set("ABCDE") - {first.peer})
    group.crash(first.peer)
    for peer in others:
        group.event(peer, events.PeerDown(first.peer))
        assert group.machines[peer].node._round._timeouts.leader != first
    group.start(first.peer)
    for peer in others:
        group.event(peer, events.PeerUp(first.peer))
        assert first not in group.machines[peer].node._round._timeouts._given_up


def test_a_voters_word_moves_another_one_once_a_turn() -> None:
    """It moved another one once in as many turns as there are members: where two of five were gone, the other three
    waited for different leaders while their turns grew. A liar gains no more by it than a turn a turn, since a leader
    given up is not followed before the others were tried."""
    group = GroupOfNodes("ABCDE")
    group.lost = lambda source, target, message: isinstance(message, msg.PlanMessage) and group.round(source) == 1
    group.run_to(1)
    head = group.head("A")
    dead = leader_of(head, head.hash, 0)
    group.crash(dead.peer)
    me, voter = [member for member in head.members if member != dead][:2]
    waits = group.machines[me.peer].node._round._timeouts
    moved = []
    for _turn in range(3):
        for _ in range(2):
            later = attempt_of(head, head.hash, voter, waits.latest + 1)
            waits._given_up.discard(voter)
            moved.append(waits.heard(voter, later))
        waits.expire()
    assert moved == [True, False] * 3


def test_a_member_that_promises_to_a_later_leader_leads_no_attempt_of_its_own() -> None:
    """When its turn came it first answered a leader that had to wait, and then took the promise back by leading."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    dead, mine, later = (leader_of(head, head.hash, attempt) for attempt in range(3))
    group.lost = lambda source, target, message: True
    group.crash(dead.peer)
    prepare = msg.PrepareMessage(head.hash, 2, position_of(head))
    waits = group.machines[mine.peer].node._round._timeouts
    waits._given_up.update((mine, later))  # until all were tried
    group.event(mine.peer, events.Received(later.peer, prepare))
    assert waits.awaited == 0
    first = len(group.sent)
    group.event(mine.peer, events.PeerDown(dead.peer))
    group.run(0.5)
    said = [message for source, _, message in group.sent[first:] if source == mine.peer]
    assert any(isinstance(message, msg.PromiseMessage) for message in said)
    assert not any(isinstance(message, msg.PrepareMessage) for message in said) and waits.awaited == 2


def test_what_there_is_when_a_plans_time_is_over_is_merged() -> None:
    """The leader went on in the moment when the members stopped, and had nothing: they were slower than they had been,
    so no plan's time was ever enough."""
    group = GroupOfNodes("ABC", train_s=1000.0)
    group.run_to(2, seconds=150.0)
    failed = [told["reason"] for peer in "ABC" for told in group.told(peer, "attempt_failed")]
    assert "no member has submitted a contribution" not in failed


@pytest.mark.parametrize("mode", ["required", "witness"])
def test_a_leader_that_was_frozen_follows_those_that_have_gone_on(mode: str) -> None:
    """It had planned, so it took its own attempt for one that made progress, and refused the attempts of the only other
    member for as long as its plan might take. That one had promised more, and could not help it any more."""
    group = GroupOfNodes("AB", mode=mode, stalled_s=1e6, train_s=2.0)
    group.run_to(2)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    (other,) = set("AB") - {leader}
    group.run(5.0, lambda: group.machines[other].node._round.instance.plan is not None)
    assert group.head("A") == head
    group.isolate(leader)
    group.event(other, events.PeerDown(leader))
    group.event(COORDINATOR, events.PeerDown(leader))
    group.run(1.0)
    assert group.machines[other].node._round._timeouts.latest > 0
    group.heal()
    group.event(other, events.PeerUp(leader))
    group.event(COORDINATOR, events.PeerUp(leader))
    group.run_to(head.round + 1, seconds=10.0)


def test_a_leader_that_waits_for_votes_does_not_wait_for_a_silent_witness() -> None:
    """Two of four had voted when they were cut off from the others and the coordinator's process ended. After the cut
    they waited for its vote for as long as an exchange may take, while the other two had gone on."""
    slow = Work(SCHEDULE, lambda head: 4, lambda head: 60.0)
    group = GroupOfNodes("ABCD", work=slow, stalled_s=1e6)
    group.run_to(2)
    head = group.head("A")
    near = {leader_of(head, head.hash, attempt).peer for attempt in (0, 1)}
    far = set("ABCD") - near
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage) and target not in near
    group.run_until_sent(msg.VoteMessage)
    group.crash(COORDINATOR)
    group.isolate(*near)
    for peer in "ABCD":
        for other in far if peer in near else near:
            group.event(peer, events.PeerDown(other))
    group.run(10.0)
    assert {group.round(peer) for peer in "ABCD"} == {2}
    group.heal()
    for peer in "ABCD":
        for other in far if peer in near else near:
            group.event(peer, events.PeerUp(other))
    group.run_to(3, seconds=15.0)


@pytest.mark.parametrize("when", ["exchange", "before"])
def test_an_exchange_whose_owner_is_down_is_not_waited_for(when: str) -> None:
    """The leader waited for as long as an exchange may take, although the owner's connection had ended."""
    slow = Work(SCHEDULE, lambda head: 4, lambda head: 60.0)
    group = GroupOfNodes("ABCD", work=slow, stalled_s=1e6)
    group.run_to(2)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    victim = min(set("ABCD") - {leader})
    kind = msg.RosterMessage if when == "exchange" else msg.SubmitMessage
    group.run(5.0, lambda: any(isinstance(m, kind) and s in (leader, victim) for s, _, m in group.sent[-3:]))
    assert group.head("A") == head
    group.crash(victim)
    for peer in {*"ABCD", COORDINATOR} - {victim}:
        group.event(peer, events.PeerDown(victim))
    group.run_to(3, "".join(set("ABCD") - {victim}), seconds=10.0)
    merged = group.head(leader).absent
    assert [absence.member.peer for absence in merged] == [victim]
