"""Rules that random schedules seldom put to the test: each is broken here by one scene that was made for it."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3

from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.records import LINK_KEY, LinkRecord
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes


def brought_back(group: GroupOfNodes, rounds: int) -> int:
    """Cut C off for so many rounds and let it come back at once; return the round at which it stood meanwhile."""
    group.run_to(2)
    group.isolate("C")
    left = group.round("C")
    group.run_to(left + rounds, "AB")
    group.heal()
    group.run_to(left + rounds)
    group.run(0.1)  # all of the way is on disk
    return left


def links_of(group: GroupOfNodes, peer: str) -> dict[str, LinkRecord]:
    """Return the links on its disk, by key."""
    records = group.machines[peer].records
    return {
        key: msgspec.msgpack.decode(record, type=LinkRecord)
        for key, record in records.items()
        if key.startswith(LINK_KEY)
    }


def test_the_whole_way_to_a_head_is_on_disk() -> None:
    """A peer that went over several heads at once shows them after a restart, to those that are behind."""
    group = GroupOfNodes("ABC")
    left = brought_back(group, rounds=5)
    group.crash("C")
    group.start("C")
    way = group.machines["C"].node._chain.ancestors()
    assert [head.round for head in way] == list(range(way[0].round, -1, -1)) and way[0].round >= left + 5


def test_a_way_that_is_half_on_disk_was_never_gone() -> None:
    """Power fails while the links of a way are written: the peer stands where it stood, whose state it has."""
    group = GroupOfNodes("ABC")
    left = brought_back(group, rounds=5)
    links, stood = links_of(group, "C"), group.head("C")
    passed = [key for key, record in links.items() if not record.stands]
    assert passed, "it has gone over several heads at once"
    first = min(links[key].number for key in passed)
    group.crash("C")
    for key, record in links.items():
        if record.number > first:
            del group.machines["C"].records[key]
    node = group.start("C").node
    assert node.head.round == left and node.head.state_hash in group.machines["C"].stored_states
    group.run_to(stood.round + 3)


def test_a_regroup_believes_accepted_values_with_evidence_only() -> None:
    """A peer reports a value that its leader has made and never proposed. It may have been chosen by no quorum."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.run(0.1)
    _, voter, third, message = group.lose_leader_after_votes()
    head = group.head(voter)
    group.crash(third)
    group.heal()

    def change(source: str, sent: msg.Message) -> msg.Message:
        if source == voter and isinstance(sent, msg.ReportMessage) and sent.accepted is not None:
            body = msg.ProposalBody(head.hash, sent.accepted.attempt, sent.accepted.value.hash)
            own = group.sign(voter, evidence.PROPOSAL, body)  # the leader's is what it takes
            return msgspec.structs.replace(sent, accepted=msgspec.structs.replace(sent.accepted, proposal=own))
        return sent

    group.change = change
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(20.0, lambda: group.head(voter).term == 2)
    start = group.machines[voter].node._chain.link(group.head(voter).hash)
    assert start is not None and start.start is not None
    assert start.head.previous == head.hash != message.value.hash


def test_a_proved_liar_leaves_the_group() -> None:
    group = GroupOfNodes("ABCD")
    group.run_to(2)
    head = group.head("D")
    for state in (1, 2):
        other = msgspec.structs.replace(head, state_hash=bytes([state]) * 32)
        group.event("A", events.Received("D", msg.VoteMessage(group.vote("D", head, 0, other))))
    group.run_to(head.round + 2, "ABC")
    assert {member.peer for member in group.head("A").members} == set("ABC"), "it works, and is out all the same"


def test_a_free_value_is_of_its_own_attempts_roster() -> None:
    """A liar that nothing forces proposes what an earlier leader's roster leads to: that may lack those of its own."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.lost = lambda source, target, sent: isinstance(sent, msg.ProposalMessage)
    first, _, earlier = group.run_until_sent(msg.ProposalMessage)
    group.crash(first)  # it alone has accepted its value
    group.run(60.0, lambda: any(source != first for source, _ in proposals(group, earlier.value.previous)))
    liar, own = next(entry for entry in proposals(group, earlier.value.previous) if entry[0] != first)
    group.run(0.3)
    (victim,) = set("ABC") - {first, liar}
    body = msgspec.msgpack.decode(own.proposal.body, type=msg.ProposalBody)
    assert body.attempt > 0 and own.promises and earlier.value.attempt == 0
    signed = group.sign(liar, evidence.PROPOSAL, msgspec.structs.replace(body, value=earlier.value.hash))
    packed = msg.ProposalMessage(signed, earlier.value, own.promises, earlier.support)
    (accusation,) = [found for found in group.give(victim, packed, liar) if isinstance(found, actions.Accuse)]
    assert accusation.peer == liar and "roster of another attempt" in accusation.reason


@pytest.mark.parametrize(("peers", "mode"), [("ABC", "witness"), ("ABCD", "witness"), ("ABC", "required")])
def test_a_peer_whose_build_differs_in_a_bit_holds_up_no_group(peers: str, mode: str) -> None:
    """Once it led, it alone accepted its state, and each later leader had to propose that, which no other could build:
    no round was committed any more, and no operator was told."""
    group = GroupOfNodes(peers, mode=mode)
    odd = blake3(b"another build").digest()
    group.build = lambda peer, state: (0.05, blake3(odd + state).digest() if peer == "A" else state)
    group.run_to(12)
    led = {leader_of(head, head.hash, 0).peer for head in group.machines["B"].committed[:-1]}
    assert "A" in led and group.head("A") in group.machines["B"].committed and not group.accusations()


def proposals(group: GroupOfNodes, head: bytes) -> list[tuple[str, msg.ProposalMessage]]:
    """Return (source, message) of each proposal after that head, in order."""
    sent = ((source, message) for source, _, message in group.sent if isinstance(message, msg.ProposalMessage))
    return [(source, message) for source, message in sent if message.value.previous == head]
