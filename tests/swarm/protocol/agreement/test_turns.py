"""Whose turn it is: leaders that come back, voters that wait for different leaders, slow networks."""

from __future__ import annotations

from swarm.protocol.agreement import events
from swarm.protocol.agreement.rules.electorate import attempt_of, leader_of
from tests.swarm.protocol.agreement.group import GroupOfNodes


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
        assert group.machines[peer].node._height._turns.leader != first
    group.start(first.peer)
    for peer in others:
        group.event(peer, events.PeerUp(first.peer))
        assert first not in group.machines[peer].node._height._turns._given_up


def test_a_voters_word_moves_another_one_once_a_turn() -> None:
    """It moved another one once in as many turns as there are members: where two of five were gone, the other three
    waited for different leaders while their turns grew. A liar gains no more by it than a turn a turn, since a leader
    given up is not followed before the others were tried."""
    group = GroupOfNodes("ABCDE")
    group.run_to(1)
    head = group.head("A")
    dead = leader_of(head, head.hash, 0)
    group.crash(dead.peer)
    me, voter = [member for member in head.members if member != dead][:2]
    waits = group.machines[me.peer].node._height._turns
    moved = []
    for _turn in range(3):
        for _ in range(2):
            later = attempt_of(head, head.hash, voter, waits.latest + 1)
            waits._given_up.discard(voter)
            moved.append(waits.heard(voter, later))
        waits.expire()
    assert moved == [True, False] * 3
