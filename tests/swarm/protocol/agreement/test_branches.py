"""The operator's new term goes on beside members that were cut off, and then its weights are lost."""

from __future__ import annotations

import pytest

from swarm.protocol.agreement import events, links, records
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.rules.shown_heads import ShownHeads
from swarm.protocol.head import Member
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes


def forked(cut_s: float = 30.0, train_s: float = 1.0, peers: str = "ABC") -> GroupOfNodes:
    """B and the coordinator are cut from the others, the operator regroups, both sides commit, and B's disk dies."""
    group = GroupOfNodes(peers, train_s=train_s)
    group.run_to(3)
    group.isolate("B", COORDINATOR)
    group.run(20.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(cut_s)
    assert group.head("B").term == 2 and group.head("B").round > group.round("A") >= 3
    group.crash("B")
    group.machines["B"].has.clear()
    group.start("B", wiped=True)
    return group


def keep_no_genesis(group: GroupOfNodes) -> None:
    """No machine can bring the state of round 0 any more."""
    for peer, machine in group.machines.items():
        machine.has.discard(GENESIS.state_hash)
        group.event(peer, events.StateFetched(GENESIS.state_hash, False))


def test_a_node_goes_on_in_its_own_term_until_the_higher_ones_state_is_here() -> None:
    """It stopped committing although both votes arrived, for a state that nobody had."""
    group = forked()
    before = group.round("A")
    group.heal()
    group.run_to(before + 5, "AC")
    assert group.head("A").term == 1


def test_who_has_no_head_follows_a_lower_term_where_nobody_has_the_state_of_the_highest() -> None:
    """B asked for the state of its own lost term for ever, and stayed at round 0."""
    group = forked()
    group.heal()
    group.run(3.0)
    group.isolate(COORDINATOR)
    group.event("B", events.PeerUp("A"))
    group.run_to(group.round("A") + 5)
    assert {group.head(peer).term for peer in "ABC"} == {1}


def test_who_is_behind_follows_its_own_term_where_nobody_has_the_state_of_the_highest() -> None:
    """E asked for that state alone, and stayed where it had been cut off."""
    group = forked(peers="ABCDE")
    group.heal()
    group.run(3.0)
    group.isolate("E")
    group.run_to(group.round("A") + 5, "ACD")
    group.heal()
    group.isolate(COORDINATOR)
    group.run_to(group.round("A") + 5, "ACDE")
    assert {group.head(peer).term for peer in "ACDE"} == {1}


@pytest.mark.parametrize("genesis", [True, False])
@pytest.mark.parametrize("cut_s", [30.0, 150.0])
def test_a_start_begins_at_the_furthest_head_of_any_branch(genesis: bool, cut_s: float) -> None:
    """It began at round 0, and took back what A and C held. A long branch is proved in several pages."""
    group = forked(cut_s)
    if not genesis:
        keep_no_genesis(group)
    lost = group.round(COORDINATOR) - 3
    group.heal()
    group.run(5.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(5.0)
    told = group.told(COORDINATOR, "regroup_undoes")
    assert told and told[-1]["goes_on_at"] >= group.round("A") - 6, "the operator is asked first"
    reached = group.round("A")
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run_to(reached + 4, "AC")
    assert group.head("A").term == group.head("C").term > 2
    regrouped = group.told(COORDINATOR, "regrouped")[-1]
    assert regrouped["round"] >= reached and regrouped["undone"] >= lost
    group.run_to(reached + 12)  # B is taken in again


def test_what_another_branch_has_committed_is_taken_back_only_by_the_operator() -> None:
    """Where the term of the coordinator is the furthest, the rounds of the others are lost, and told."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    group.isolate("B", COORDINATOR)
    group.run(20.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(30.0)
    assert group.round("B") > group.round("A") > 3
    held = group.round("A") - 3
    group.serves = False  # so that A and C stay where they are
    group.heal()
    group.lost = lambda source, target, message: "B" in (source, target) and COORDINATOR not in (source, target)
    group.run(3.0)
    group.event(COORDINATOR, events.RegroupRequested(without=("B",)))
    group.run(5.0)
    assert group.told(COORDINATOR, "regroup_undoes")
    assert held > 0 and group.head("A").term == 1


def test_a_coordinator_that_was_away_for_long_finds_its_group_again() -> None:
    """After 256 rounds no chain led from its head to theirs, for ever, and no newcomer was taken in."""
    group = GroupOfNodes("ABC", train_s=0.2)
    group.run_to(3)
    group.isolate(COORDINATOR)
    group.run_to(300, "ABC", seconds=600.0)
    group.heal()
    group.run(10.0)
    assert group.round(COORDINATOR) >= group.round("A") - 1
    group.start("d")
    reached = group.round("A")
    group.run_to(reached + 10, "ABCd")
    assert group.member("d") in group.head("A").members


@pytest.fixture
def few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes keep the links of twelve heads."""
    monkeypatch.setattr(records, "LINKS_KEPT", 12)


@pytest.mark.usefixtures("few_links")
def test_a_witness_that_was_away_for_longer_than_links_are_kept_finds_its_group_again() -> None:
    group = GroupOfNodes("ABC", train_s=0.2)
    group.run_to(3)
    group.isolate(COORDINATOR)
    group.run_to(40, "ABC", seconds=600.0)
    group.heal()
    group.run(10.0)
    assert group.round(COORDINATOR) >= group.round("A") - 1
    assert group.head("A").term == 1


def test_the_oldest_links_go_where_they_are_too_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupOfNodes("AB", train_s=0.2)
    group.run_to(12)
    made = [link for link in group.machines["A"].node._chain._links.values() if link.votes]
    size = len(encode(made[0]))
    monkeypatch.setattr(links, "LINKS_BYTES_MAX", 4 * size)
    kept = links.KeptLinks()
    for link in made:
        before = list(kept.values())
        room = sum(len(encode(other)) for other in (*before, link)) <= 4 * size
        dropped = kept.keep(link.head.hash, link)
        assert sum(len(encode(other)) for other in kept.values()) <= 4 * size
        assert [*dropped, *kept.values()] == [*before, link] and (not dropped) == room, "the oldest go"
    monkeypatch.setattr(links, "LINKS_BYTES_MAX", 1)
    kept.keep(made[0].head.hash, made[0])
    assert list(kept.values()) == [made[0]], "the last one stays, however long"


def test_a_member_that_slept_for_longer_than_links_are_kept_follows_from_what_the_coordinator_has_endorsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = GroupOfNodes("ABC", train_s=0.2)
    group.run_to(3)
    link = group.machines["A"].node._chain.link(group.head("A").hash)
    assert link is not None
    monkeypatch.setattr(links, "LINKS_BYTES_MAX", 20 * len(encode(link)))  # more than to the last endorsement
    slept_at = group.head("C").hash
    group.isolate("C")
    group.run_to(50, "AB", seconds=600.0)
    assert group.machines["A"].node._chain.link(slept_at) is None
    group.heal()
    group.run_to(group.round("A") + 2)


@pytest.mark.usefixtures("few_links")
def test_one_of_three_voters_is_not_believed_beyond_the_links_kept() -> None:
    group = GroupOfNodes("ABC", train_s=0.2)
    group.run_to(3)
    group.isolate(COORDINATOR)
    group.run_to(40, "ABC", seconds=600.0)
    group.heal()
    group.lost = lambda source, target, message: COORDINATOR in (source, target) and not {"A", "d"} & {source, target}
    group.run(10.0)
    assert group.round(COORDINATOR) == 3
    group.heal()
    group.run(10.0)
    assert group.round(COORDINATOR) > 40, "two of three are"


@pytest.mark.usefixtures("few_links")
def test_a_branch_that_has_gone_on_for_longer_than_links_are_kept_is_not_taken_back() -> None:
    """The operator was told of one round, and took back sixty: no link led from the coordinator to the others."""
    group = forked(cut_s=4.0, train_s=0.2)
    group.run_to(30, "AC", seconds=600.0)
    group.heal()
    group.run(5.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(5.0)
    reached = group.round("A")
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run_to(reached + 4, "AC")
    assert group.told(COORDINATOR, "regrouped")[-1]["round"] >= reached > 30


@pytest.mark.usefixtures("few_links")
def test_a_required_coordinator_goes_back_beyond_the_links_kept_by_the_operator() -> None:
    """It stopped with an error of its own, and so would have for ever."""
    group = GroupOfNodes("AB", mode="required", train_s=0.2)
    group.run_to(20, seconds=600.0)
    for peer in "AB":
        group.crash(peer)
        group.machines[peer].has = {GENESIS.state_hash}
    group.start("A", wiped=True)
    group.run(20.0)
    for _ in range(2):
        group.event(COORDINATOR, events.RegroupRequested(undo=True, without=("B",)))
        group.run(10.0)
    assert group.head(COORDINATOR).term == 2 and group.told(COORDINATOR, "regrouped")[-1]["round"] == 0


def test_only_members_of_a_head_count_and_a_peer_once() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(3)
    head = group.head("A")
    link = group.machines["A"].node.proof_of(head.hash)[-1]
    shown = ShownHeads()
    shown.note("A", [link])
    assert not shown.by_most(head.hash, [head]), "it has not said as whom it speaks"
    for voter in (group.member("A"), group.member("A"), Member("d", "d0")):
        shown.heard(voter)
        shown.note(voter.peer, [link])
    assert not shown.by_most(head.hash, [head])
    shown.heard(group.member("C"))
    shown.note("C", [link])
    assert shown.by_most(head.hash, [head])
    assert not shown.by_most(head.hash, [GENESIS]) and not shown.by_most(b"?", [head])


def test_two_branches_find_each_other_without_the_coordinator() -> None:
    """Each told only its own members where it stood, and both went on beside each other for ever."""
    group = GroupOfNodes("ABCDE")
    group.run_to(3)
    group.isolate("B", "C", COORDINATOR)
    group.run(20.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(40.0)
    assert group.head("B").term == 2 and group.head("A").term == 1
    assert {member.peer for member in group.head("A").members} == {"A", "D", "E"}
    group.crash(COORDINATOR)
    group.heal()
    group.run_to(group.round("B") + 8, "ABCDE")
    assert {group.head(peer).term for peer in "ABCDE"} == {2}
