"""The coordinator as a required voter: what it starts by itself, what it waits for, and when it stops."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.head import Sponsor, Sponsorship
from tests.swarm.protocol.agreement.group import COORDINATOR, WORK, GroupOfNodes


def test_a_required_coordinator_regroups_by_itself() -> None:
    """B4, B5: from the last head that it certified, with those that hold its state."""
    group = GroupOfNodes("ABCD", mode="required")
    group.run_to(2)
    group.crash("C")
    group.crash("D")
    group.run(60.0)
    assert group.head("A").term >= 2 and group.round("A") > 2
    group.check()


def test_a_start_takes_in_only_those_that_hold_its_state() -> None:
    """A quorum of them that had lost their disks would have to wait for one member that may be gone."""
    group = GroupOfNodes("ABCD", mode="required")
    group.run_to(2)
    group.serves = False
    group.crash("B")
    group.start("C", wiped=True)
    group.run(60.0, lambda: any(head.term == 2 for head in group.machines["A"].committed))
    start = next(head for head in group.machines["A"].committed if head.term == 2)
    assert start.members == (group.member("A"), group.member("D")) and start.attempt == -1
    group.serves = True
    group.run_to(group.round("A") + 4, "ACD")
    group.check()


@pytest.mark.parametrize("allowed", [False, True])
def test_one_of_three_goes_on_alone_where_the_run_allows_it(allowed: bool) -> None:
    """A cut that leaves the coordinator with one liar gave it the run. An operator may go on with one, and is told so
    once: it had heard only that too few answer, and that one does."""
    group = GroupOfNodes("ABC", mode="required", lone_survivor=allowed)
    group.run_to(2)
    group.crash("B")
    group.crash("C")
    group.run(60.0)
    assert (group.head("A").term >= 2) == allowed
    if not allowed:
        first, second = (told["reason"] for told in group.told(COORDINATOR, "quorum_lost"))
        assert first == "too few members answer"
        assert second.endswith("one is left, which may lie: only the operator can go on")
        group.event(COORDINATOR, events.RegroupRequested(without=("B", "C")))
    group.run_to(group.round("A") + 2, "A")
    assert group.head("A").members == (group.member("A"),)


@pytest.mark.parametrize("allowed", [False, True])
def test_newcomers_go_on_alone_where_the_run_allows_it(allowed: bool) -> None:
    """A cut between the coordinator and all members gave the run to whoever waited to be taken in."""
    group = GroupOfNodes("ABC", mode="required", lone_survivor=allowed)
    group.run_to(2)
    group.start("D")
    group.run(60.0, lambda: any(learner.member.peer == "D" for learner in group.head("D").learners))
    assert group.head(COORDINATOR) == group.head("D")
    group.isolate("A", "B", "C")
    group.run(60.0)
    assert (group.head(COORDINATOR).term >= 2) == allowed
    if allowed:
        assert group.head("D").members == (group.member("D"),)
    else:
        last = group.told(COORDINATOR, "quorum_lost")[-1]
        assert last["reason"].endswith("newcomers may lie: only the operator can go on")
        assert last["away"] == ["A", "B", "C"]
        group.heal()
        group.run_to(group.round("A") + 2, "ABC")
        assert group.head("A").term == 1, "nothing was taken from the members"
    group.check()


@pytest.mark.parametrize(
    ("known", "left", "members"), [("DE", "", "DE"), ("D", "", ""), ("DE", "A", "ADE"), ("", "A", "")]
)
def test_two_members_of_other_groups_go_on_for_members_that_are_lost(known: str, left: str, members: str) -> None:
    """They have worked for this run before. A stage of a pipeline that had lost all its replicas, or all but one,
    waited for the operator beside peers that had its state."""
    work = dataclasses.replace(WORK, is_known=lambda peer: peer in known)
    group = GroupOfNodes("ABC", mode="required", work=work)
    group.run_to(2)
    group.train_s = 1e6
    for newcomer in "DEF":
        group.start(newcomer)
    group.run(10.0)
    head = group.head(COORDINATOR)
    assert all(group.head(peer) == head and not head.has(group.member(peer)) for peer in "DEF")
    group.isolate(*(peer for peer in "ABC" if peer not in left))
    group.run(60.0)
    started = group.head(COORDINATOR)
    assert started.term == (2 if members else 1)
    if members:
        assert started.members == tuple(group.member(peer) for peer in members)
    else:
        assert str(group.told(COORDINATOR, "quorum_lost")[-1]["reason"]).endswith("only the operator can go on")
    group.check()


def test_newcomers_with_which_a_term_begins_show_invites() -> None:
    """All that held the state were members, without an invite or with one that another of them had come with."""
    group = GroupOfNodes("A", mode="required")
    group.run_to(1)
    for peer, invite in (("B", b"one"), ("C", b"one"), ("D", b"forged")):
        group._config["credential"] = invite
        group.start(peer)
    group.train_s = 1e6
    group.run(10.0)
    head = group.head(COORDINATOR)
    assert all(group.head(peer) == head for peer in "BCD")
    group.isolate("A")
    group.run(60.0, lambda: group.head(COORDINATOR).term > head.term)
    (member,) = group.head(COORDINATOR).members
    assert member.peer in "BC"
    assert group.head(COORDINATOR).sponsored == (Sponsorship(Sponsor("one", 1), member.peer),)


def test_one_of_two_goes_on_alone() -> None:
    group = GroupOfNodes("AB", mode="required")
    group.run_to(2)
    group.crash("B")
    group.run(60.0)
    assert group.head("A").term >= 2 and group.head("A").members == (group.member("A"),)


def test_a_small_start_that_ended_no_round_makes_no_way_to_a_lone_member() -> None:
    """First two of four are left, then one of these two: a liar that has been cut off with the coordinator twice."""
    group = GroupOfNodes("ABCD", mode="required", stalled_s=20.0)
    group.run_to(2)
    group.train_s = 1e6
    group.isolate("C", "D")
    group.run(60.0, lambda: len(group.head("A").members) == 2)
    term = group.head("A").term
    assert term == 2
    group.isolate("B", "C", "D")
    group.run(100.0)
    assert group.head("A").term == term and group.told(COORDINATOR, "quorum_lost")
    group.heal()
    group.run(100.0, lambda: len(group.head("A").members) == 4)
    assert len(group.head("A").members) == 4


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_complete_run_needs_no_quorum_any_more(mode: str) -> None:
    """Its members leave after the last round: no new term begins, and no operator is called."""
    group = GroupOfNodes("ABC", mode=mode, rounds=3)
    group.run_to(3)
    for peer in "ABC":
        group.crash(peer)
    group.run(300.0)
    assert group.round(COORDINATOR) == 3 and group.head(COORDINATOR).term == 1
    assert not group.told(COORDINATOR, "quorum_lost")
    group.start("A")
    group.run(300.0)
    assert group.head("A").term == 1, "one of three came back, to show its weights"


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_complete_stage_goes_on_until_all_are(mode: str) -> None:
    """The other stages of a pipeline need it for their last rounds."""
    others_are: list[bool] = []
    work = dataclasses.replace(WORK, is_over=lambda: bool(others_are))
    group = GroupOfNodes("ABC", mode=mode, rounds=3, work=work, lone_survivor=True)
    group.run_to(3)
    for peer in "BC":
        group.crash(peer)
    group.run(100.0)
    assert group.told(COORDINATOR, "quorum_lost") and group.head("A").term == (2 if mode == "required" else 1)
    others_are.append(True)
    group.crash("A")
    term, told = group.head(COORDINATOR).term, len(group.told(COORDINATOR, "quorum_lost"))
    group.run(100.0)
    assert group.head(COORDINATOR).term == term and len(group.told(COORDINATOR, "quorum_lost")) == told


def test_nothing_is_committed_without_a_required_coordinator() -> None:
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(2)
    group.isolate(COORDINATOR)
    rounds = {peer: group.round(peer) for peer in "ABC"}
    group.run(30.0)
    assert all(group.round(peer) <= rounds[peer] + 1 for peer in "ABC")
    group.heal()
    group.run_to(max(rounds.values()) + 3)


def test_a_required_coordinator_has_written_before_any_other_peer_hears_of_its_vote() -> None:
    """B2: it stands at the new head, on disk, and only then lets its vote out."""
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(1)
    node = group.machines[COORDINATOR].node
    group.lost = lambda source, target, message: target == COORDINATOR and isinstance(message, msg.VoteMessage)
    group.run(4.0, lambda: bool(node._round.instance.proposed))
    head = group.head(COORDINATOR)
    ((attempt, proposed),) = node._round.instance.proposed.items()
    found: list[actions.Action] = []
    for peer in "AB":
        vote = msg.VoteMessage(group.vote(peer, head, attempt, proposed.value))
        found = group.give(COORDINATOR, vote, peer)
    assert node.head == proposed.value
    assert [type(action) for action in found if not isinstance(action, actions.SetTimer)] == [actions.Persist]
    (record,) = [action for action in found if isinstance(action, actions.Persist)]
    out = node.step(group.now, events.Persisted(record.id))
    assert any(isinstance(action, actions.Send) and isinstance(action.message, msg.ChainMessage) for action in out)


def test_a_restarted_required_coordinator_asks_before_it_starts_a_term() -> None:
    """B7: put back from a backup unnoticed, it hears of what its disk forgot from n - k + 1 members, or starts
    nothing."""
    group = GroupOfNodes("ABC", mode="required", lone_survivor=True)
    group.run_to(1)
    backup = dict(group.machines[COORDINATOR].records)
    group.run_to(4)
    group.crash(COORDINATOR)
    group.machines[COORDINATOR].records = backup
    for peer in "AB":
        group.crash(peer)
    group.start(COORDINATOR)
    group.run(120.0)
    assert group.head("C").term == 1, "one of three answers: it may not be the newest"
    for peer in "AB":
        group.start(peer)
    group.run_to(6)
    assert group.head("A").term == 1
    group.check()


def test_a_restarted_required_coordinator_whose_members_lost_their_disks_calls_the_operator() -> None:
    """B7: no member of its head is left to tell whether its disk is the newest."""
    group = GroupOfNodes("AB", mode="required")
    group.run_to(2)
    for peer in ("A", "B", COORDINATOR):
        group.crash(peer)
    for peer in "AB":
        group.start(peer, wiped=True)
    group.start(COORDINATOR)
    group.run(60.0)
    assert group.told(COORDINATOR, "quorum_lost") and group.head(COORDINATOR).term == 1
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run(30.0)
    assert group.told(COORDINATOR, "regroup_undoes")[-1]["goes_on_at"] == 0 and group.head("A").term == 1
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run(30.0)
    assert group.head("A").term == 2 and group.round("A") > 0, "both hold the first state, and begin again from there"


def test_a_required_coordinator_goes_back_only_after_a_long_time() -> None:
    """B6: the members of its last head lost their disks; after `undo_s` it starts from the newest head that a peer
    holds."""
    group = GroupOfNodes("ABC", mode="required", undo_s=30.0, lone_survivor=True)
    group.run_to(2)
    group.isolate("C")
    group.run_to(4, "AB")
    behind = group.round("C")
    for peer in "AB":
        group.crash(peer)
    group.machines["A"].has.clear()
    group.machines["B"].has.clear()
    for peer in "AB":
        group.start(peer, wiped=True)
    group.heal()
    group.run(20.0)
    assert group.head("C").term == 1
    group.run(200.0)
    assert group.head("C").term >= 2 and group.round("C") > behind
    group.check()


def test_a_required_coordinator_stops_at_its_own_signature_that_it_does_not_know() -> None:
    """B9: its disk is an old copy. It neither votes nor starts anything until the operator regroups."""
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(3)
    group.run(0.1)
    before, head = group.machines[COORDINATOR].committed[-2:]
    other = msgspec.structs.replace(head, state_hash=bytes(32))
    forged = tuple(group.vote(peer, before, 0, other) for peer in "AB")
    group.event(COORDINATOR, events.Received("A", msg.ChainMessage((msg.ChainLink(other, votes=forged),))))
    assert not group.told(COORDINATOR, "coordinator_restored")
    votes = (*forged, group.vote(COORDINATOR, before, 0, other))
    group.event(COORDINATOR, events.Received("A", msg.ChainMessage((msg.ChainLink(other, votes=votes),))))
    group.run(0.1)
    assert group.told(COORDINATOR, "coordinator_restored")
    stopped = group.round("A")
    group.run(20.0)
    assert group.round("A") <= stopped + 1
    group.event(COORDINATOR, events.RegroupRequested())
    group.run_to(stopped + 3)
    assert group.head("A").term > 1000
