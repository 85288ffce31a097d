"""Faults of new terms that the simulator has found, each as the shortest directed schedule that shows it."""

from __future__ import annotations

import msgspec
import pytest

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Head, Sponsor, Sponsorship
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes


def start_from(group: GroupOfNodes, base: Head, members: str, undoes: tuple[bytes, ...] = ()) -> msg.ChainMessage:
    """Return the start of term 9 over a head."""
    head = msgspec.structs.replace(
        base, term=9, boot=1, previous=base.hash, members=tuple(group.member(peer) for peer in members), attempt=-1
    )
    signed = group.sign(COORDINATOR, evidence.START, msg.StartBody(head, undoes))
    return msg.ChainMessage((msg.ChainLink(head, start=signed),))


def signed_starts(group: GroupOfNodes) -> list[Head]:
    """Return the starts that the coordinator has signed, in order of their terms."""
    bodies = [body for signer, kind, body in group.table.signed if kind == evidence.START]
    return sorted((msgspec.msgpack.decode(b, type=msg.StartBody).head for b in bodies), key=lambda head: head.term)


@pytest.mark.parametrize("said", [False, True])
def test_a_start_that_takes_back_what_came_since_is_not_followed(said: bool) -> None:
    """The group went on after it had answered the coordinator, and then left what it had committed."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    base = group.head("A")
    group.run_to(3)
    group.train_s = 1e6
    message, stood = start_from(group, base, "AB", (group.head("A").hash,) if said else ()), group.head("A")
    group.event("A", events.Received(COORDINATOR, message))
    group.run(1.1)
    assert (group.head("A").term == 9) == said
    shown = [m for source, to, m in group.sent if (source, to) == ("A", COORDINATOR) and m != message]
    links = [m.links[-1].head for m in shown if isinstance(m, msg.ChainMessage)]
    assert (stood in links) != said, "it tells the coordinator"


def test_a_start_that_came_too_late_is_followed_by_one_from_there() -> None:
    """Only C had answered, at a head after which A and B had committed a round meanwhile."""
    group = GroupOfNodes("ABC", train_s=3.0)  # longer than the coordinator asks
    group.run_to(2)
    group.run(0.1)
    base = group.head(COORDINATOR)
    group.lost = lambda source, target, message: COORDINATOR in (source, target) and "C" not in (source, target)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(1.9)
    group.isolate("C", COORDINATOR)
    group.run(0.2)
    assert signed_starts(group)[-1].previous == base.hash
    group.crash("C")
    group.run_to(base.round + 1, "AB")
    group.start("C")
    group.train_s = 1e6
    stood = group.head("A")
    group.heal()
    group.run(8.0)
    last = signed_starts(group)[-1]
    assert last.previous == stood.hash and {group.head(peer) for peer in ("A", "B", "C", COORDINATOR)} == {last}
    assert [head.term for head in group.machines["A"].committed[-2:]] == [1, last.term], "it went to none between"
    group.train_s = 1.0
    group.run_to(stood.round + 2)
    group.check()


def test_a_start_that_came_too_late_counts_once_its_term_has_ended_a_round() -> None:
    """Those that the operator has gone on with keep what they have done since, and the others come to them."""
    group = GroupOfNodes("ABCDE")
    group.run_to(2)
    group.isolate("D", "E", COORDINATOR)
    group.run(20.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(20.0)
    reached = group.head("D")
    assert reached.term == 2 and group.head("A").term == 1 and group.round("A") > reached.round - 20
    group.heal()
    group.run_to(reached.round + 4, "ABCDE")
    assert {group.head(peer).term for peer in "ABCDE"} == {2} and len(signed_starts(group)) == 2


def test_an_answer_brings_the_chain_that_proves_it() -> None:
    """The coordinator knew that a peer was ahead, and started below it: the chain was still on its way."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.lost = lambda source, target, message: (
        COORDINATOR in (source, target) and not isinstance(message, msg.AskMessage | msg.ReportMessage)
    )
    before = group.round(COORDINATOR)
    group.run_to(before + 3, "ABC")
    assert group.round(COORDINATOR) <= before + 1
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(0.05)
    assert group.round(COORDINATOR) >= before + 3


def hides_starts(source: str, target: str, message: object) -> bool:
    """Lose what shows a start."""
    return isinstance(message, msg.ChainMessage) and any(link.start is not None for link in message.links)


def test_a_regroup_while_the_first_start_is_under_way_begins_no_second_group() -> None:
    """It dropped the first start, which some members then followed while others followed a second one."""
    group = GroupOfNodes("ABC")
    group.lost = hides_starts
    group.run(3.0)
    assert len(signed_starts(group)) == 1 and group.head("A") == GENESIS
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(3.0)
    assert len(signed_starts(group)) == 1 and group.told(COORDINATOR, "regroup_withdrawn")
    group.heal()
    group.run_to(2)
    assert group.head("A").term == 1


def test_a_group_whose_first_members_lost_their_disks_begins_anew_once_the_operator_says_so() -> None:
    group = GroupOfNodes("ABC")
    group.lost = hides_starts
    group.run(3.0)
    for peer in "ABC":
        group.crash(peer)
        group.start(peer, wiped=True)
    group.heal()
    group.run(12.0)
    assert group.round("A") == 0 and group.told(COORDINATOR, "quorum_lost")
    group.event(COORDINATOR, events.RegroupRequested())
    group.run_to(2, seconds=30.0)


def begun_alone(group: GroupOfNodes) -> int:
    """Let a required coordinator start a term with A alone, while B and C are cut off; return the term. From then on
    no peer trains."""
    group.run_to(2)
    group.isolate("B", "C")
    group.run(60.0, lambda: group.head("A").members == (group.member("A"),))
    assert group.head("A").members == (group.member("A"),)
    group.train_s = 1e6
    return group.head("A").term


def test_a_term_that_ends_no_round_is_followed_by_one_with_those_that_came_back() -> None:
    """Its only member was a liar that led for ever: the coordinator heard it, so it did nothing for ten rounds."""
    group = GroupOfNodes("ABC", mode="required", stalled_s=1e6, lone_survivor=True)
    term = begun_alone(group)
    group.heal()
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None
    group.run(4.0 * coordinator.watch.patient_s, lambda: group.head("A").term > term)
    assert group.head("A").term == term + 1
    assert {member.peer for member in group.head("A").members} == set("ABC")
    group.train_s = 1.0
    group.run_to(group.round("A") + 2)


def test_those_that_were_members_lately_return_in_the_next_start() -> None:
    """A term's only member ended a round of it, and then none: the others were in no head since the last commit."""
    group = GroupOfNodes("ABC", mode="required", stalled_s=20.0, lone_survivor=True)
    group.run_to(2)
    group.isolate("B", "C")
    group.run(60.0, lambda: group.head("A").members == (group.member("A"),))
    term, number = group.head("A").term, group.round("A")
    group.run_to(number + 1, "A")
    group.train_s = 1e6
    group.heal()
    group.run(120.0, lambda: group.head("A").term > term)
    assert {member.peer for member in group.head("A").members} == set("ABC")
    group.train_s = 1.0
    group.run_to(group.round("A") + 2)


def test_a_peer_that_the_operator_left_out_is_in_no_start_that_follows() -> None:
    """A restart of the group by itself took it in again. It may only ask to join, as any newcomer."""
    group = GroupOfNodes("ABC", mode="required", stalled_s=20.0)
    group.run_to(2)
    group.event(COORDINATOR, events.RegroupRequested(without=("C",)))
    group.train_s = 1e6
    group.lost = lambda source, target, message: isinstance(message, msg.JoinMessage)
    group.run(10.0)
    term = group.head("A").term
    assert {member.peer for member in group.head("A").members} == set("AB")
    group.run(200.0, lambda: group.head("A").term > term)
    assert {member.peer for member in group.head("A").members} == set("AB")


def test_a_required_start_takes_in_no_convicted_member() -> None:
    group = GroupOfNodes("ABC", mode="required", stalled_s=20.0)
    group.run_to(2)
    group.train_s, head = 1e6, group.head("C")
    for state in (1, 2):
        other = msgspec.structs.replace(head, state_hash=bytes([state]) * 32)
        group.event(COORDINATOR, events.Received("C", msg.VoteMessage(group.vote("C", head, 0, other))))
    assert group.accusations() == [(COORDINATOR, "C", "signed two different bodies of kind agreement.vote")]
    group.run(200.0, lambda: group.head("A").term > head.term)
    assert {member.peer for member in group.head("A").members} == set("AB")


def test_a_proved_liar_that_alone_holds_the_state_is_in_no_start() -> None:
    """All others are away. It was taken where no other member remained, and the run was its own."""
    group = GroupOfNodes("ABC", mode="required", lone_survivor=True)
    group.run_to(2)
    head = group.head("C")
    for state in (1, 2):
        other = msgspec.structs.replace(head, state_hash=bytes([state]) * 32)
        group.event(COORDINATOR, events.Received("C", msg.VoteMessage(group.vote("C", head, 0, other))))
    group.isolate("A", "B")
    group.run(100.0)
    assert group.head(COORDINATOR).term == 1 and group.told(COORDINATOR, "regroup_failed")
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(30.0)
    assert group.head(COORDINATOR).term == 1, "nor where the operator asks"
    group.heal()
    group.run_to(head.round + 3, "AB")
    assert {member.peer for member in group.head("A").members} == set("AB")


def test_those_that_come_back_in_a_start_keep_their_invites() -> None:
    """Another peer could have come in with the invite of one that a start had left out and the next one took back."""
    group = GroupOfNodes("", mode="required", stalled_s=1e6, min_peers=3, lone_survivor=True)
    for peer in "ABC":
        group._config["credential"] = f"invite {peer}".encode()
        group.start(peer)
    invites = tuple(Sponsorship(Sponsor(f"invite {peer}", 1), peer) for peer in "ABC")
    term = begun_alone(group)
    assert group.head("A").sponsored == invites[:1]
    group.heal()
    group.run(60.0, lambda: group.head("A").term > term)
    assert group.head("A").sponsored == invites
