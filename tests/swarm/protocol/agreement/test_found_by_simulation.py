"""Faults that the simulator has found, each as the shortest directed schedule that shows it."""

from __future__ import annotations

import msgspec
import pytest

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.head import Member
from swarm.protocol.plan import CONTRIBUTION_KIND
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes, contribution_body


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_regroup_before_the_group_has_begun_begins_nothing(mode: str) -> None:
    """The coordinator sealed and answered itself, and made itself the only member of a group without weights."""
    group = GroupOfNodes("ABC", mode=mode)
    group.isolate(COORDINATOR)
    group.run(1.0)
    group.event(COORDINATOR, events.Asked())
    group.run(5.0)
    assert group.head(COORDINATOR) == GENESIS and group.told(COORDINATOR, "regroup_failed")
    group.heal()
    group.run_to(2)
    assert {member.peer for member in group.head("A").members} == set("ABC")


def test_only_the_latest_incarnation_that_answers_is_in_a_new_term() -> None:
    """Both incarnations of a peer became members, and the dead one counted towards the quorum."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    old = group.member("C")
    group.crash("A")
    group.crash("B")
    group.event(COORDINATOR, events.Asked())
    group.run(0.5)  # the old C has answered
    group.crash("C")
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None and coordinator.inquiry is not None and old in coordinator.inquiry.told
    reborn = msgspec.structs.replace(coordinator.inquiry.told[old], voter=Member("C", "reborn"))
    group.event(COORDINATOR, events.Received("C", reborn))
    group.run(5.0)
    starts = [
        msgspec.msgpack.decode(body, type=say.StartBody).head
        for signer, kind, body in sorted(group.table.signed)
        if kind == evidence.START
    ]
    latest = max(starts, key=lambda head: head.term)
    assert latest.term == 2 and latest.members == (Member("C", "reborn"),)


def test_a_bad_contribution_in_a_promise_is_held_against_its_sender() -> None:
    """The leader reads all promises when the last one comes; that one's sender was accused, and the attempt hung."""
    group = GroupOfNodes("ABCD", mode="open", faults=1)
    group.run_to(1)
    head = group.head("A")
    first, second = (leader_of(head, head.hash, attempt) for attempt in (0, 1))
    liar, last = sorted({m for m in head.members} - {first, second})

    def bad(source: str, message: say.Message) -> say.Message:
        if source != liar.peer or not isinstance(message, say.PromiseMessage) or message.plan is None:
            return message
        body = contribution_body(liar, message.plan)
        greedy = msgspec.structs.replace(body, steps=body.steps * 1000, samples=body.samples * 1000)
        return msgspec.structs.replace(message, contribution=group.sign(liar.peer, CONTRIBUTION_KIND, greedy))

    group.change = bad
    group.run_until_sent(say.PlanMessage)
    group.run(0.1)  # all have the plan of the first leader, which now dies
    group.crash(first.peer)
    for peer in (second.peer, liar.peer, last.peer):
        group.event(peer, events.PeerDown(first.peer))
    group.run_to(2, [second.peer, last.peer])  # type: ignore[arg-type]
    assert {accused for _, accused, _ in group.accusations()} == {liar.peer}


def test_a_leader_without_any_peer_that_may_work_gives_its_attempt_up() -> None:
    """All that promised are proved liars: there is no plan to make."""
    group = GroupOfNodes("AB")
    group.run_to(1)
    node = group.machines["A"].node
    head = group.head("A")
    for peer in "AB":
        bodies = [say.VoteBody(head.hash, 7, bytes([i]) * 32, group.member(peer)) for i in range(2)]
        proof = say.Contradiction(evidence.VOTE, *(group.sign(peer, evidence.VOTE, body) for body in bodies))
        for machine in group.machines.values():
            if machine.peer != COORDINATOR:
                machine.node._applicants.take_proof(proof)
    group.run(20.0)
    failed = [told["reason"] for peer in "AB" for told in group.told(peer, "attempt_failed")]
    assert "no peer that may work has promised" in failed and set(node._applicants.proofs) == {"A", "B"}
