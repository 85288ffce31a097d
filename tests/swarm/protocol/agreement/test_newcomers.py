"""Newcomers of groups whose rounds take no longer than a message's way to them and the replay of a round there."""

from __future__ import annotations

import pytest

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from tests.swarm.protocol.agreement.group import GroupOfNodes

GRACE_S = 0.5  # as in `AgreementConfig`
LATE_S = GRACE_S / 2


def quick_group(peers: str, train_s: float, fetch_s: float) -> GroupOfNodes:
    """Return a group that has begun; its rounds take `train_s` and 30 ms."""
    group = GroupOfNodes(peers, train_s=train_s)
    group.delay_s, group.merge_s, group.fetch_s = 0.003, 0.005, fetch_s
    group.build = lambda peer, state: (0.008, state)
    group.run_to(1)
    return group


def round_s(group: GroupOfNodes, rounds: int = 20) -> float:
    """Return how long a round takes now."""
    began, first = group.now, group.round("A")
    group.run(60.0, lambda: group.round("A") >= first + rounds)
    return (group.now - began) / rounds


@pytest.mark.parametrize("peers", ["AB", "ABC"])
@pytest.mark.parametrize("train_s", [0.02, 0.07])
@pytest.mark.parametrize("fetch_s", [0.01, 0.04])
def test_a_newcomer_of_a_quick_group_becomes_a_member(peers: str, train_s: float, fetch_s: float) -> None:
    """It follows the commits, each of which takes it almost a round, and has never promised when a plan is made."""
    group = quick_group(peers, train_s, fetch_s)
    assert 0.045 < round_s(group) < 0.105
    group.start("D")
    began = group.round("A")
    group.run(60.0, lambda: group.head("A").has(group.member("D")))
    assert group.head("A").has(group.member("D"))
    assert group.round("A") - began < 60
    group.run_to(group.round("A") + 5)


@pytest.mark.parametrize("peers", ["AB", "ABC"])
def test_no_round_waits_for_a_newcomer_whose_work_has_come(peers: str) -> None:
    """It came after that of all members, and the leader waited for the rest of its moment all the same."""
    group = quick_group(peers, 0.02, 0.01)
    usual_s = round_s(group)
    group.start("D")
    group.run(60.0, lambda: group.head("A").learners != ())
    first, began = group.round("A"), group.now
    group.run(60.0, lambda: group.head("A").has(group.member("D")))
    assert (group.now - began) / (group.round("A") - first) < 2 * usual_s


@pytest.mark.parametrize("peers", ["AB", "ABC"])
def test_a_newcomer_that_never_promises_costs_a_moment_of_few_rounds(peers: str) -> None:
    """After two rounds that it has missed it is planned for every five seconds, then less and less often."""
    group = quick_group(peers, 0.02, 0.01)
    usual_s = round_s(group)
    silent = (msg.PromiseMessage, msg.SubmitMessage)
    group.lost = lambda source, target, message: source == "D" and isinstance(message, silent)
    group.start("D")
    for _ in range(100):
        assert round_s(group, 1) < LATE_S + 2 * usual_s
    assert round_s(group, 300) < 1.2 * usual_s
    assert not group.head("A").has(group.member("D")) and not group.head("A").learners


def test_a_newcomer_that_promises_after_another_one_has_submitted_stops_no_round() -> None:
    """The leader's timer was for the newcomer that had not promised; then none was left for the one that had."""
    group = quick_group("ABC", 0.02, 0.01)
    promised: list[str] = []

    def lost(source: str, target: str, message: msg.Message) -> bool:
        if source == "D" and isinstance(message, msg.SubmitMessage) and held and not promised:
            promised.append(target)
            group.later(0.05, target, events.Received("E", held[-1]))
        if source == "E" and isinstance(message, msg.PromiseMessage):
            held.append(message)
            return True
        return source == "E" and isinstance(message, msg.SubmitMessage)

    held: list[msg.Message] = []
    group.lost = lost
    group.start("D")
    group.start("E")
    group.run(30.0, lambda: bool(promised))
    assert promised
    at, began = group.round("A"), group.now
    group.run(30.0, lambda: group.round("A") > at)
    assert group.now - began < 2 * GRACE_S
