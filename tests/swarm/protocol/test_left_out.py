"""What comes of a member that others have judged by the loss: leaders leave it out, each by what it has found alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement.round.attempt import Attempt
from swarm.protocol.agreement.round.collector import Collector
from swarm.protocol.head import Head, Member
from swarm.protocol.roster_room import RosterRoom
from tests.swarm.protocol.agreement.group import GroupOfNodes

ROUNDS = 16


def heads_after(judgements: dict[str, tuple[str, ...]]) -> list[Head]:
    """Return the heads of rounds in which each of these peers has judged those others."""
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    for judge, judged in judgements.items():
        group.event(judge, events.Judged(judged))
    begun = group.round("A") + 1
    group.run_to(begun + ROUNDS)
    return [head for head in group.machines["A"].committed if head.round > begun]


def test_an_outcome_that_is_taken_back_counts_no_more() -> None:
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    for judge in "ABC":
        group.event(judge, events.Judged(("D",)))
        group.event(judge, events.Judged(()))
    group.run_to(group.round("A") + 1)
    begun = group.round("A")
    group.run_to(begun + ROUNDS)
    assert not any(away(head) for head in group.machines["A"].committed if head.round > begun)


def test_a_roster_keeps_a_member_of_the_head() -> None:
    """A leader whose owner has paused it contributes nothing: where it has judged the only other member, what is left
    are learners, of whom no roster can be made."""
    member, *learners = [Member(name, "s") for name in "BCD"]
    node = SimpleNamespace(
        _excluded=set(),
        _context=SimpleNamespace(
            judged=frozenset("B"), roster_room=lambda head, name: RosterRoom(head, name, slices=1)
        ),
        _instance=SimpleNamespace(head=SimpleNamespace(has=lambda one: one == member), hash=b""),
    )
    signed = (Signed(b"", "", b""), None)
    attempt = SimpleNamespace(contributions=dict.fromkeys((member, *learners), signed))
    assert Collector.members(cast(Collector, node), cast(Attempt, attempt)) == [member, *learners]
    attempt.contributions[Member("E", "s")] = signed
    node._instance.head.has = lambda one: one.peer in "BE"
    assert member not in Collector.members(cast(Collector, node), cast(Attempt, attempt))


def away(head: Head) -> set[str]:
    return {absence.member.peer for absence in head.absent}


def members(head: Head) -> set[str]:
    return {member.peer for member in head.members}


def test_a_member_that_all_others_have_judged_is_put_out() -> None:
    heads = heads_after(dict.fromkeys("ABC", ("D",)))
    assert any(away(head) == {"D"} for head in heads) and members(heads[-1]) == {"A", "B", "C"}


def test_one_judge_alone_puts_out_none() -> None:
    heads = heads_after({"A": ("D",)})
    assert all(members(head) == set("ABCD") for head in heads)
    left_out = [head for head in heads if away(head)]
    assert left_out and len(left_out) < len(heads), "it is left out where A leads"
    assert all(away(head) == {"D"} for head in left_out)
    assert {absence.leader.peer for head in left_out for absence in head.absent} == {"A"}


@pytest.mark.parametrize("judged", [("B", "C"), ("B", "C", "D")])
def test_who_judges_half_of_the_contributors_or_more_is_not_believed_by_itself(judged: tuple[str, ...]) -> None:
    assert not any(away(head) for head in heads_after({"A": judged}))
