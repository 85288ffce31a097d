"""A plan is sent to each peer once: a peer that has it says so, and what is lost is sent again."""

from __future__ import annotations

from collections import Counter

import msgspec

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.head import Member
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes, plan_in

TRAINING_S = 20.0
ROUND = 2


def is_plan(message: msg.Message) -> bool:
    """Return whether a message is a plan of the round that is looked at."""
    return isinstance(message, msg.PlanMessage) and plan_in(message.plan).round == ROUND


def plans_sent(group: GroupOfNodes) -> Counter[str]:
    """Return how often each peer was sent the plan of the round by another one."""
    return Counter(target for source, target, message in group.sent if source != target and is_plan(message))


def contributors(group: GroupOfNodes) -> set[str]:
    """Return the members that the round's head does not note as absent."""
    head = next(head for head in group.machines["A"].committed if head.round == ROUND)
    return {member.peer for member in head.members} - {absence.member.peer for absence in head.absent}


def test_members_that_train_long_are_sent_their_plan_once() -> None:
    """It was sent each second to all that still trained: 6.1 of the 10 MB that a leader of 64 sent in a round."""
    group = GroupOfNodes("ABCDEFGH", train_s=TRAINING_S)
    group.run_to(ROUND)
    sent = plans_sent(group)
    assert len(sent) == 7 and set(sent.values()) == {1}, sent


def test_a_lost_plan_is_sent_again_to_the_peer_that_lacks_it() -> None:
    group = GroupOfNodes("ABCD", train_s=TRAINING_S)
    lost: list[str] = []

    def lose(source: str, target: str, message: msg.Message) -> bool:
        if source != target and is_plan(message) and lost.count(target) < 3 and target == max(set("ABCD") - {source}):
            lost.append(target)
            return True
        return False

    group.lost = lose
    group.run_to(ROUND)
    (peer,) = set(lost)
    sent = plans_sent(group)
    assert sent.pop(peer) == 4 and set(sent.values()) == {1}, sent
    assert contributors(group) == set("ABCD")


def test_a_peer_whose_word_is_lost_is_sent_its_plan_again() -> None:
    group = GroupOfNodes("ABCD", train_s=TRAINING_S)
    lost: list[str] = []

    def lose(source: str, target: str, message: msg.Message) -> bool:
        said = isinstance(message, msg.StatusMessage) and message.plan is not None and message.position[2] == ROUND - 1
        if said and not lost:
            lost.append(source)
        return said and lost == [source]

    group.lost = lose
    group.run(60.0, lambda: bool(lost))
    group.run(3.5)
    group.heal()
    group.run_to(ROUND)
    sent = plans_sent(group)
    assert 3 <= sent.pop(lost[0]) <= 5 and set(sent.values()) == {1}, sent


def test_a_member_that_restarts_as_it_trains_is_sent_its_plan_again() -> None:
    """It had said that it has the plan, which went with its process."""
    group = GroupOfNodes("ABCD", train_s=TRAINING_S)
    group.run(60.0, lambda: bool(plans_sent(group)))
    group.run(5.0)
    peer = min(plans_sent(group))
    group.crash(peer)
    group.start(peer)
    group.run_to(ROUND)
    sent = plans_sent(group)
    assert sent.pop(peer) == 2 and set(sent.values()) == {1}, sent
    assert contributors(group) == set("ABCD")


def test_a_lost_request_to_finish_early_is_repeated() -> None:
    group = GroupOfNodes("ABCD", train_s=1.0, finish_s=5.0)
    lost: list[str] = []
    slow: list[str] = []

    def lose(source: str, target: str, message: msg.Message) -> bool:
        if isinstance(message, msg.SubmitMessage) and source != target and group.round(source) == ROUND - 1:
            slow.extend([source] if not slow else [])
            return source == slow[0] and len(lost) < 2
        if isinstance(message, msg.PlanMessage) and message.finish_early and source != target:
            lost.append(target)
            return len(lost) <= 2
        return False

    group.lost = lose
    group.run_to(ROUND)
    assert lost[:3] == slow * 3 and contributors(group) == set("ABCD")


def test_what_strangers_say_of_a_plan_is_not_kept() -> None:
    """There may be any number of them, each with any number of incarnations."""
    group = GroupOfNodes("ABCD", train_s=TRAINING_S)
    group.run(60.0, lambda: bool(plans_sent(group)))
    leader = next(source for source, _, message in group.sent if is_plan(message))
    attempt = group.machines[leader].node._round.leader._attempt
    assert attempt is not None and attempt.plan is not None
    group.run(3.0)
    informed, head = set(attempt.informed), group.head(leader)
    other = min(member.peer for member in informed)
    for peer, session in (("x", "x0"), (other, "another")):
        status = msg.StatusMessage(
            position_of(head), head.hash, Member(peer, session), True, 0, attempt.plan.hash, b"", True
        )
        group.event(leader, events.Received(peer, status))
    assert attempt.informed == informed and "x" not in attempt.exchanging and len(informed) == 3


def test_software_that_does_not_say_which_plan_it_has_is_sent_that_each_second() -> None:
    """The field came after the protocol's number: a peer without it takes part as before."""
    group = GroupOfNodes("ABCD", train_s=TRAINING_S)
    group.change = lambda source, message: (
        msgspec.structs.replace(message, plan=None)
        if isinstance(message, msg.StatusMessage) and source in ("A", "B")
        else message
    )
    group.run_to(ROUND)
    sent = plans_sent(group)
    assert all((sent[peer] > TRAINING_S - 2) == (peer in ("A", "B")) for peer in sent), sent
    assert COORDINATOR not in sent and contributors(group) == set("ABCD")
