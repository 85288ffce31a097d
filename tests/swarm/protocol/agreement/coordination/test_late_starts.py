"""Members that were away while a term began: none leaves a round of its own for a start that missed it, whatever the
start goes on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.head import Head
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes
from tests.swarm.protocol.agreement.test_starts_found_by_simulation import signed_starts

Loses = Callable[[str, str, msg.Message], bool]


def no_round(*leaders: str) -> Loses:
    """Lose the proposals of these leaders and the promises to them, so that they end no round, and no second leader
    takes over what the first one has accepted."""
    return lambda source, target, message: (
        (isinstance(message, msg.ProposalMessage) and source in leaders)
        or (isinstance(message, msg.PromiseMessage) and target in leaders)
    )


def cut(*side: str) -> Loses:
    """Lose all messages between these peers and the others."""
    return lambda source, target, message: (source in side) != (target in side)


def lose(group: GroupOfNodes, *kinds: Loses) -> None:
    group.lost = lambda source, target, message: any(lost(source, target, message) for lost in kinds)


def furthest(group: GroupOfNodes, peers: str) -> Head:
    return max((group.head(peer) for peer in peers), key=lambda head: head.round)


def require_kept(group: GroupOfNodes, peers: str, *still: Loses) -> None:
    """Heal the group but for `still`, in which these peers end no round, and require that the coordinator's next start
    goes on from their last round (or a value after it, which may have been chosen), and that none of them goes to
    another start between."""
    lose(group, *still)
    stood = furthest(group, peers)
    before = {peer: len(group.machines[peer].committed) for peer in peers}
    group.run(20.0)
    last = signed_starts(group)[-1]
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None
    assert stood in list(coordinator._branches.way_to(last))[:3], "the start, a value, their last round"
    for peer, count in before.items():
        gone_to = group.machines[peer].committed[count:]
        assert [head for head in gone_to if head.attempt < 0] == [last], f"{peer} goes to none between"
    group.heal()
    group.run_to(stood.round + 2)
    group.check()


def test_a_start_from_a_value_that_was_only_accepted_takes_no_round_back() -> None:
    """The four that went on lost 19 rounds: the base was no head of theirs. The operator was told of none."""
    group = GroupOfNodes("ABCDEFG")
    group.run_to(3)
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage | msg.VoteMessage)
    leader, _, proposal = group.run_until_sent(msg.ProposalMessage)
    others = sorted(set("ABCDEFG") - {leader})
    side, rest = (leader, *others[:2], COORDINATOR), "".join(others[2:])
    lose(group, cut(*side))
    group.run_to(group.round(leader) + 20, rest)
    group.run(1.0)
    lose(group, cut(*side), no_round(*"ABCDEFG"))
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(5.0)
    assert signed_starts(group)[-1].previous == proposal.value.hash, "it goes on from what may have been chosen"
    require_kept(group, rest, no_round(*"ABCDEFG"))


def test_two_starts_before_a_round_ends_take_no_round_back() -> None:
    """The base of the second one was the first, which the members that went on had not followed: twelve rounds."""
    group = GroupOfNodes("ABCDE")
    group.run_to(3)
    lose(group, cut("D", "E", COORDINATOR), no_round("D", "E"))
    group.run(60.0)
    for _ in range(2):
        group.event(COORDINATOR, events.RegroupRequested())
        group.run(61.0)
    assert len(signed_starts(group)) == 3 and signed_starts(group)[-1].round < group.round("A") - 12
    lose(group, cut("D", "E", COORDINATOR), no_round(*"ABCDE"))
    group.run(5.0)
    require_kept(group, "ABC", no_round(*"ABCDE"))


def test_a_start_from_another_branch_takes_no_round_back() -> None:
    """D and E had gone on in the operator's term, which a later start took back from the coordinator's last news."""
    group = GroupOfNodes("ABCDE")
    group.run_to(3)
    lose(group, cut("D", "E", COORDINATOR))
    group.run(20.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run_to(group.round("D") + 2, "DE")
    lose(group, cut("D", "E"), no_round(*"ABC"))
    group.run(20.0)
    for undo in (False, True):
        group.event(COORDINATOR, events.RegroupRequested(without=("D", "E"), undo=undo))
        group.run(5.0)
    start = signed_starts(group)[-1]
    assert start.term == 3 and {member.peer for member in start.members} == set("ABC")
    group.run_to(start.round + 3, "DE", seconds=400.0)
    stood, behind = furthest(group, "DE"), len(group.machines["D"].committed)
    lose(group, no_round(*"ABCDE"))
    group.run(10.0)
    assert stood.term == 2 and all(head.term == 2 for head in group.machines["D"].committed[behind:])


def test_a_start_waits_for_members_of_its_term_that_say_they_have_gone_on() -> None:
    """D and E had ended a round of the operator's term, and had said so; the proof came half a second later. The
    coordinator went on from the others, who were further, without a word."""
    group = GroupOfNodes("ABCDE")
    group.run_to(3)
    lose(group, cut("D", "E", COORDINATOR), no_round("D", "E"))
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(30.0)
    group.change = lambda source, message: (
        msgspec.structs.replace(message, links=())
        if isinstance(message, msg.ReportMessage) and source in ("D", "E")
        else message
    )
    unproved = lambda source, target, message: (  # noqa: E731
        source in ("D", "E") and target not in ("D", "E") and not isinstance(message, msg.ReportMessage)
    )
    lose(group, cut("D", "E", COORDINATOR), unproved)
    group.run_to(group.head(COORDINATOR).round + 1, "DE")
    stood = group.head("D")
    lose(group, unproved, no_round(*"ABCDE"))
    group.run(20.0)
    assert stood.term == 2 and [start.term for start in signed_starts(group)] == [1, 2], "none by itself"
    group.heal()
    group.run(20.0)
    assert {group.head(peer).term for peer in "ABCDE"} == {2}


def test_only_a_peer_itself_says_that_it_has_gone_on() -> None:
    """In another's name it would hold up starts, and cost its sender nothing."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    group.lost = lambda source, target, message: source == "C" and isinstance(message, msg.ReportMessage)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(0.1)
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None and coordinator.inquiry is not None
    term, boot, round = position_of(group.head(COORDINATOR))
    told = msg.ReportMessage(coordinator.inquiry.nonce, group.member("C"), (term, boot, round + 9), bytes(32), ())
    group.event(COORDINATOR, events.Received("A", told))
    assert not coordinator.inquiry.further
    group.event(COORDINATOR, events.Received("C", msgspec.structs.replace(told, nonce="another")))
    assert not coordinator.inquiry.further
    group.event(COORDINATOR, events.Received("C", told))
    assert coordinator.inquiry.further == {group.member("C")}


def test_a_round_that_the_coordinator_is_about_to_stand_at_is_one_to_lose() -> None:
    """C proved it with the last answer, at which the coordinator decided, still at the head before."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    usual, group.build = group.build, lambda peer, state: (0.05, None if peer == "C" else state)
    lose(group, cut("C", COORDINATOR))
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(30.0)
    silent: Loses = lambda source, target, message: source == "C" and target == COORDINATOR  # noqa: E731
    group.build = usual
    lose(group, cut("C", COORDINATOR), silent)
    group.run_to(group.head(COORDINATOR).round + 1, "C")
    healed = group.now
    last: Loses = lambda source, target, message: (  # noqa: E731
        silent(source, target, message) and not (isinstance(message, msg.ReportMessage) and group.now > healed + 1.0)
    )
    lose(group, last, no_round(*"ABC"))
    group.run(20.0)
    assert group.head("C").term == 2 and [told["term"] for told in group.told(COORDINATOR, "regrouped")] == [1, 2]


def test_a_value_that_may_have_been_chosen_is_a_round_to_lose() -> None:
    """D and E had both voted for it, and the coordinator knew: it went on from the others without a word."""
    group = GroupOfNodes("ABCDE")
    group.run_to(3)
    alone = cut("D", "E", COORDINATOR)
    lose(group, alone, lambda source, target, message: isinstance(message, msg.ProposalMessage) and source in "DE")
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(60.0)
    values = {peer: group.machines[peer].node._round.instance.accepted for peer in "DE"}
    assert len({accepted and accepted.value for accepted in values.values()}) == 1 and values["D"] is not None
    lose(group, no_round(*"ABCDE"))
    group.run(10.0)
    (told,) = group.told(COORDINATOR, "regroup_undoes")
    assert told["undone"] == 1 and "with A, B, C: undoes 1" in told["branches"][0]
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run(10.0)
    assert group.head("D").term == 3 and group.head("D").round >= group.round("A") > 12


@pytest.mark.parametrize("late", ["A", "d"])
def test_a_start_over_a_start_is_followed_by_those_that_lose_nothing(late: str) -> None:
    """A is at the last round, d at the first head. The start between was lost on its way to both."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    if late == "d":
        group.start("d")
    group.build = lambda peer, state: (0.05, None)  # nothing is proposed, and no value may have been chosen
    lose(group, cut(late))
    group.run(60.0)
    for _ in range(2):
        group.event(COORDINATOR, events.RegroupRequested())
        group.run(61.0)
    assert [start.round for start in signed_starts(group)][1:] == [group.round("B")] * 2
    group.heal()
    group.run(10.0)
    assert group.head(late) == group.head(COORDINATOR)


def begun_again(**config: Any) -> GroupOfNodes:
    """A coordinator without its records, which does not know that, runs beside newcomers, and its members are away."""
    group = GroupOfNodes("ABC", **config)
    group.run_to(8)
    boot = group.head("A").boot
    begins_above = False
    while not begins_above:  # by its boot id, which is drawn
        group.crash(COORDINATOR)
        coordinator = group.start(COORDINATOR, wiped=True).node._coordinator
        begins_above = coordinator is not None and coordinator._boot > boot
    lose(group, cut("A", "B", "C"))
    for peer in "def":
        group.start(peer)
    group.run(6.0)
    return group


def test_members_know_of_each_term_number_one_start() -> None:
    """A coordinator that was put back without its records began term 1 again, and they went from round 27 to 1."""
    group = begun_again()
    assert group.head("d").term == 1 and group.round("A") > 8
    group.heal()
    stood = group.round("A")
    group.run_to(stood + 3, "ABC")
    assert {group.head(peer).boot for peer in "ABC"} == {group.machines["A"].committed[0].boot}
    assert group.told(COORDINATOR, "coordinator_restored"), "and the operator is told"
    for undo in (False, True):
        group.event(COORDINATOR, events.RegroupRequested(undo=undo))
        group.run(6.0)
    further, other = group.told(COORDINATOR, "regroup_undoes")[-1]["branches"]
    assert "with A, B, C:" in further and "with d, e, f:" in other
    assert group.head("A").term > 1000
    group.run_to(group.round("A") + 8, "ABCdef")


def test_a_coordinator_without_records_asks_before_it_begins_the_group() -> None:
    """Its home was there before, so the run may have begun."""
    group = begun_again(begin_s=30.0)
    assert group.round("d") == 0 and len(signed_starts(group)) == 1
    group.heal()
    group.run(60.0)
    assert group.told(COORDINATOR, "coordinator_restored") and len(signed_starts(group)) == 1
    assert group.round("d") > 8, "the newcomers go where the members are"


def test_a_coordinator_without_records_begins_where_no_member_answers() -> None:
    group = begun_again(begin_s=30.0)
    group.run(30.0)
    assert group.head("d").term == 1 and len(signed_starts(group)) == 2
