"""New terms: what they begin from and who follows; what the coordinator believes and what its disk forgets (F3 to F6,
F16)."""

from __future__ import annotations

import msgspec
import pytest

from peer.identity import Signed
from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.rules import evidence
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes


def test_the_first_term_begins_once_enough_peers_wait() -> None:
    group = GroupOfNodes("ABC", min_peers=3)
    group.crash("C")
    group.run(10.0)
    assert group.head("A") == GENESIS
    group.start("C")
    group.run_to(1)
    assert {member.peer for member in group.head("A").members} == set("ABC")
    assert group.head("A").term == 1 and group.head("A").boot > 0


@pytest.mark.parametrize("peers", ["ABC", "ABCD"])
def test_a_group_goes_on_without_its_coordinator(peers: str) -> None:
    """F3: where it is a witness, its absence ends nothing and starts nothing."""
    group = GroupOfNodes(peers)
    group.run_to(2)
    group.isolate(COORDINATOR)
    group.run_to(8, peers)
    assert group.head("A").term == 1 and set(group.head("A").members) >= {group.member(peer) for peer in peers}
    group.heal()
    group.run(10.0)
    assert group.round(COORDINATOR) >= 8 and group.head("A").term == 1
    group.check()


def test_a_lost_quorum_is_told_and_waits_for_the_operator() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.crash("B")
    group.crash("C")
    group.run(60.0)
    stopped = group.head("A")
    assert stopped.term == 1
    (told,) = group.told(COORDINATOR, "quorum_lost")
    assert told["away"] == ["B", "C"]
    group.event(COORDINATOR, events.RegroupRequested())
    group.run_to(stopped.round + 2, "A")
    assert group.head("A").term == 2 and group.head("A").members == (group.member("A"),)
    for peer in "BC":
        group.start(peer)
    group.run(40.0)
    assert {member.peer for member in group.head("A").members} == set("ABC"), "they learn, and are members again"
    group.check()


def test_who_dies_after_a_quorum_was_lost_is_named_too() -> None:
    """Their owners were told nothing, and the operator waited for the first of them only."""
    group = GroupOfNodes("ABCDE")
    group.run_to(2)
    for gone in ("CDE", "B", "A"):
        for peer in gone:
            group.crash(peer)
        group.run(60.0)
    group.start("B")
    group.run(60.0)
    group.crash("B")
    group.run(60.0)
    told = group.told(COORDINATOR, "quorum_lost")
    assert [one["away"] for one in told] == [list("CDE"), list("BCDE"), list("ABCDE")]
    assert [one["alone"] for one in told] == [False, False, True]


def test_rounds_that_a_restarted_witness_catches_up_with_say_nothing_about_their_length() -> None:
    """It learned of two rounds within half a second, and took a group of slow rounds for one that stood still: a
    operator's regroup then cost the training of the round under way."""
    group = GroupOfNodes("ABC", train_s=30.0, lost_s=10.0)
    group.run_to(2)
    group.crash(COORDINATOR)
    group.run_to(3, "ABC")
    group.start(COORDINATOR)
    group.run(20.0)
    assert group.round(COORDINATOR) == group.round("A") == 3
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(2.5)
    assert group.told(COORDINATOR, "regroup_withdrawn") and group.head("A").term == 1
    group.check()


def test_a_regroup_is_withdrawn_where_a_quorum_answers() -> None:
    """F4: asking a live group costs it nothing; it goes on even if the coordinator then dies."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(2.5)
    assert group.told(COORDINATOR, "regroup_withdrawn")
    group.crash(COORDINATOR)
    group.run_to(group.round("A") + 3, "ABC")
    assert group.head("A").term == 1


def started(group: GroupOfNodes, members: str, **changed: object) -> msg.ChainMessage:
    """Return the coordinator's start of term 9 over the head of A."""
    head = group.head("A")
    start = msgspec.structs.replace(
        head, term=9, boot=1, previous=head.hash, members=tuple(map(group.member, members)), attempt=-1, **changed
    )
    signed = group.sign(COORDINATOR, evidence.START, msg.StartBody(start))
    return msg.ChainMessage((msg.ChainLink(start, start=signed),))


@pytest.mark.parametrize("restarted", [False, True])
def test_who_follows_a_start_takes_part_in_no_lower_term(restarted: bool) -> None:
    """F3: the coordinator's signature is enough; B and C have not seen it, and a quorum goes on."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    head = group.head("A")
    group.lost = lambda source, target, message: COORDINATOR in (source, target)
    message = started(group, "A")
    group.isolate("A")
    group.event("A", events.Received(COORDINATOR, message))
    group.run(0.1)
    if restarted:
        group.crash("A")
        group.start("A")
    first = len(group.sent)
    group.run_to(head.round + 3, "BC")
    assert group.head("A").term == 9
    cast = (msg.PromiseMessage, msg.VoteMessage)
    said = [message for source, _, message in group.sent[first:] if source == "A" and isinstance(message, cast)]
    bodies = [m.vote.body if isinstance(m, msg.VoteMessage) else m.promise.body for m in said]
    assert head.hash not in {msgspec.msgpack.decode(body, type=Named).head for body in bodies}


class Named(msgspec.Struct):
    head: bytes


def test_a_start_whose_state_no_peer_brings_is_not_followed() -> None:
    """F4: fetch first. The member stays where it is and works there; its promises hold."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    found = group.give("A", started(group, "A", state_hash=bytes(32)), COORDINATOR)
    assert any(isinstance(action, actions.Fetch) for action in found)
    assert not any(isinstance(action, actions.Persist) for action in found)
    group.run_to(4)
    assert group.head("A").term == 1


def test_a_regroup_starts_from_what_may_have_been_chosen() -> None:
    """F5: two of three voted, so their value is chosen; one of the two answers. Its vote is not forgotten."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.run(0.1)
    _, voter, third, message = group.lose_leader_after_votes()
    head = group.head(voter)
    group.crash(third)
    group.heal()
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(20.0, lambda: group.head(voter).term == 2)
    start = group.machines[voter].node._chain.link(group.head(voter).hash)
    assert start is not None and start.start is not None
    assert (start.head.previous, start.head.round) == (message.value.hash, head.round + 1)
    group.run_to(head.round + 3, voter)


def test_the_coordinator_believes_no_single_member() -> None:
    """F6: a liar alone answers, with a head and an accepted value of its own. The start is from what was certified."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    group.run(0.1)
    head = group.head(COORDINATOR)
    for peer in "AB":
        group.crash(peer)
    evil = msgspec.structs.replace(head, round=head.round + 1, previous=head.hash, members=(group.member("C"),))
    group.event(COORDINATOR, events.RegroupRequested())
    group.crash("C")
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None
    inquiry = coordinator.inquiry
    assert inquiry is not None
    for accepted in (None, msg.AcceptedValue(0, evil, Signed(b"", "C", b""))):
        told = msg.ReportMessage(
            nonce=inquiry.nonce,
            voter=group.member("C"),
            position=position_of(evil if accepted is None else head),
            head=evil.hash if accepted is None else head.hash,
            holds=tuple(sorted({evil.state_hash, head.state_hash})),
            accepted=accepted,
        )
        group.event(COORDINATOR, events.Received("C", told))
        answered = {member.peer for member in inquiry.told}
        assert ("C" in answered) == (accepted is not None), "a higher position counts with its proof"
    link = msg.ChainLink(evil, votes=(group.vote("C", head, 0, evil),))
    group.event(COORDINATOR, events.Received("C", msg.ChainMessage((link,))))
    assert group.head(COORDINATOR) == head
    group.run(5.0)
    started = [
        msgspec.msgpack.decode(body, type=msg.StartBody).head
        for signer, kind, body in sorted(group.table.signed)
        if kind == evidence.START
    ]
    latest = max(started, key=lambda h: h.term)
    assert latest.term == 2 and latest.previous == head.hash and latest.round == head.round


def test_rounds_whose_state_no_peer_brings_are_undone_only_by_the_operator_who_says_so() -> None:
    group = GroupOfNodes("AB")
    group.run_to(2)
    group.isolate("B")
    group.run_to(4, "A")  # with the witness
    behind = group.head("B")
    group.crash("A")
    group.heal()
    group.run(20.0)
    assert group.told(COORDINATOR, "quorum_lost"), "B and the witness are a quorum, without the last state"
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(10.0)
    assert group.told(COORDINATOR, "regroup_undoes") and group.head("B").term == 1
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run_to(behind.round + 1, "B")
    assert group.head("B").term == 2, "a question uses up no term"
    start = max(
        (
            msgspec.msgpack.decode(body, type=msg.StartBody)
            for _, kind, body in sorted(group.table.signed)
            if kind == evidence.START
        ),
        key=lambda body: body.head.term,
    )
    assert set(start.undoes) == {head.hash for head in group.machines["A"].committed if head.round > behind.round}


def test_the_peer_that_answers_but_does_not_work_is_put_out_by_the_operator() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.crash("C")
    group.lost = lambda source, target, message: (
        "B" in (source, target) and not isinstance(message, msg.StatusMessage | msg.AskMessage | msg.ReportMessage)
    )
    group.run(20.0)
    stuck = group.round("A")
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(10.0)
    assert group.told(COORDINATOR, "regroup_withdrawn")
    group.event(COORDINATOR, events.RegroupRequested(without=("B",)))
    group.run_to(stuck + 2, "A")
    assert group.head("A").members == (group.member("A"),)


# -- the coordinator's disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_coordinator_restored_from_a_backup_waits_for_the_operator(mode: str) -> None:
    """F16: it votes and starts nothing before, and its term is past all that the lost disk may have started."""
    group = GroupOfNodes("ABC", mode=mode)
    group.run_to(1)
    backup = dict(group.machines[COORDINATOR].records)
    group.run_to(3)
    group.crash(COORDINATOR)
    group.machines[COORDINATOR].records = backup
    group.crash("C")
    before = len([1 for signer, kind, _ in group.table.signed if signer == COORDINATOR])
    group.start(COORDINATOR, restored=True)
    group.crash("B")
    group.run(100.0)
    kinds = {kind for signer, kind, _ in group.table.signed if signer == COORDINATOR}
    assert before and kinds and group.head("A").term == 1
    group.event(COORDINATOR, events.RegroupRequested(undo=True))
    group.run(30.0)
    assert group.head("A").term >= 1001 and group.round("A") > 3
    group.check()


def test_terms_of_two_processes_differ() -> None:
    """F16: two starts of one number are two terms, in one order for all."""
    group = GroupOfNodes("AB")
    group.run_to(1)
    first = group.head("A")
    group.crash(COORDINATOR)
    group.machines[COORDINATOR].records.clear()
    group.isolate(COORDINATOR)
    node = group.start(COORDINATOR).node
    for member in first.members:
        join = group.sign(member.peer, evidence.JOIN, msg.JoinBody(GENESIS.hash, member))
        group.event(COORDINATOR, events.Received(member.peer, msg.JoinMessage(join)))
    group.run(3.0)
    again = node.head
    assert again.term == first.term and again.boot != first.boot and again.hash != first.hash


def test_the_witness_has_a_new_identity_in_each_process() -> None:
    """Its promises are not on its disk, so its old identity votes no more; the next commit names the new one."""
    group = GroupOfNodes("AB")
    group.run_to(1)
    old = group.head("A").witness
    group.crash(COORDINATOR)
    group.start(COORDINATOR)
    group.run_to(group.round("A") + 3)
    assert group.head("A").witness == group.member(COORDINATOR) != old


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_coordinator_stops_where_another_process_has_its_key(mode: str) -> None:
    """A successor has taken over a run whose coordinator was not lost. Both voted, each by its own disk."""
    group = GroupOfNodes("ABC", mode=mode)
    group.run_to(2)
    node, head = group.machines[COORDINATOR].node, group.head("A")
    group.train_s = 1e6
    start = started(group, "ABC")
    group.event("A", events.Received(COORDINATOR, start))
    group.run(5.0)
    assert group.head("A").term == 9 and group.told(COORDINATOR, "coordinator_restored")
    assert node._context.mute and node.head.term == 9
    group.train_s = 1.0
    group.run(30.0)
    votes = [
        msgspec.msgpack.decode(message.vote.body, type=msg.VoteBody)
        for source, _, message in group.sent
        if source == COORDINATOR and isinstance(message, msg.VoteMessage)
    ]
    assert group.head("A").hash not in {vote.head for vote in votes} and head.term == 1
    assert mode == "witness" or group.head("A").round == head.round


def test_a_restarted_witness_votes_only_after_a_commit_without_it() -> None:
    """Its promises were in memory only, so its new process is another voter until the members have named it."""
    group = GroupOfNodes("AB")
    group.run_to(2)
    before = group.machines[COORDINATOR].node.me
    group.crash(COORDINATOR)
    group.crash("B")
    group.run(1.0)
    group.start(COORDINATOR)
    at = group.round("A")
    group.run(20.0)
    assert group.head("A").witness == before != group.machines[COORDINATOR].node.me
    assert group.round("A") == at, "one of two members and a voter that the head does not name"
    group.start("B")
    group.run_to(at + 2, "AB")
    assert group.head("A").witness == group.machines[COORDINATOR].node.me
