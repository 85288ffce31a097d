"""The operator's question to all peers: what is lost, slept over or forgotten by a restart."""

from __future__ import annotations

import pytest

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from tests.swarm.protocol.agreement.coordination.test_late_starts import cut, lose, no_round
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes


@pytest.mark.parametrize("kind", [msg.AskMessage, msg.ReportMessage])
def test_a_question_or_answer_that_is_lost_is_asked_for_again(kind: type[msg.Message]) -> None:
    """One was asked once, and a start left out the member whose answer was lost."""
    group = GroupOfNodes("ABCDE")
    group.run_to(2)
    for peer in "CDE":
        group.crash(peer)
    group.run(60.0)
    lost = list[str]()

    def first(source: str, target: str, message: msg.Message) -> bool:
        if isinstance(message, kind) and "B" in (source, target) and not lost:
            lost.append(source)
            return True
        return False

    group.lost = first
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(4.0)
    assert lost and {member.peer for member in group.head("A").members} == set("AB")


def test_a_coordinator_that_stood_still_hears_the_others_before_it_judges() -> None:
    """It said that a quorum was lost 0.2 s after it woke, and a regroup that it was at left out who had answered."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    lose(group, no_round(*"ABC"))
    group.machines[COORDINATOR].frozen_until = group.now + 60.0
    group.run(61.0)
    assert not group.told(COORDINATOR, "quorum_lost")
    for peer in "BC":
        group.crash(peer)
    group.run(60.0)
    assert group.told(COORDINATOR, "quorum_lost"), "it is told where it is so"


def test_a_question_that_the_coordinator_slept_over_is_asked_again() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(3)
    lose(group, no_round(*"ABC"))
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.machines[COORDINATOR].frozen_until = group.now + 60.0
    lose(group, cut("B", "C"), no_round(*"ABC"))
    group.run(59.0)
    lose(group, no_round(*"ABC"))
    group.run(4.0)
    assert {member.peer for member in group.head("A").members} == set("ABC")


@pytest.mark.parametrize("down", [False, True])
def test_a_member_that_does_not_answer_and_is_not_named_stops_the_request(down: bool) -> None:
    """Its connection was there when the request came, and gone before the question: the run went on without it."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    for peer in "BC":
        group.crash(peer)
    group.run(60.0)
    if down:
        group.event(COORDINATOR, events.PeerUp("C"))
        group.event(COORDINATOR, events.RegroupRequested(without=("B",), all_named=True))
        group.event(COORDINATOR, events.PeerDown("C"))
    else:
        group.event(COORDINATOR, events.RegroupRequested(without=("B",), all_named=True))
    group.run(10.0)
    (told,) = group.told(COORDINATOR, "regroup_failed")
    assert told["away"] == ("C",) and str(told["reason"]).endswith("were not named: C")
    assert group.head("A").term == 1
    group.event(COORDINATOR, events.RegroupRequested(without=("B", "C"), all_named=True))
    group.run(10.0)
    assert group.head("A").term == 2 and group.head("A").members == (group.member("A"),)


def test_a_request_that_was_stopped_leaves_nobody_out() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    for peer in "BC":
        group.crash(peer)
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested(without=("B",), all_named=True))
    group.run(10.0)
    assert group.told(COORDINATOR, "regroup_failed")
    group.start("B")
    lose(group, no_round(*"AB"))
    group.run(700.0)
    group.event(COORDINATOR, events.RegroupRequested(without=("C",), all_named=True))
    group.run(10.0)
    assert {member.peer for member in group.head("A").members} == set("AB")


def test_members_that_a_quorum_does_without_need_not_be_named() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.crash("C")
    lose(group, no_round(*"AB"))
    group.run(700.0)
    group.event(COORDINATOR, events.RegroupRequested(all_named=True))
    group.run(10.0)
    assert group.head("A").term == 2 and {member.peer for member in group.head("A").members} == set("AB")


def test_a_peer_that_was_left_out_stays_out_until_the_operator_says_otherwise() -> None:
    """A restart forgot it, and so did the next plain request."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    lose(group, no_round(*"ABC"))
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested(without=("C",)))
    group.run(60.0)
    assert {member.peer for member in group.head("A").members} == set("AB")
    group.crash(COORDINATOR)
    group.start(COORDINATOR)
    group.run(700.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(60.0)
    assert group.head("A").term == 3 and {member.peer for member in group.head("A").members} == set("AB")
    group.run(700.0)
    group.event(COORDINATOR, events.RegroupRequested(readmit=("C",)))
    group.run(5.0)
    assert group.head("A").term == 4 and {member.peer for member in group.head("A").members} == set("ABC")
