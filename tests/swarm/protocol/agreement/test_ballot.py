"""One attempt has one value, a voter one vote, and nothing is said before it is on disk (F2, F10, F18, F19, F21)."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.output import Output
from swarm.protocol.agreement.round.instance import ATTEMPTS_KEPT, record_once
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.electorate import attempt_of, leader_of
from tests.swarm.protocol.agreement.group import GroupOfNodes


def proposal_of(group: GroupOfNodes) -> tuple[str, msg.ProposalMessage]:
    """Run until a leader proposes; return it and its proposal. No member has voted yet."""
    source, _, message = group.run_until_sent(msg.ProposalMessage)
    return source, message


def other_value(group: GroupOfNodes, leader: str, message: msg.ProposalMessage) -> msg.ProposalMessage:
    """Return another proposal that the same leader has signed for the same attempt."""
    body = msgspec.msgpack.decode(message.proposal.body, type=msg.ProposalBody)
    value = msgspec.structs.replace(message.value, state_hash=blake3(b"forged").digest())
    signed = group.sign(leader, evidence.PROPOSAL, msgspec.structs.replace(body, value=value.hash))
    return msgspec.structs.replace(message, proposal=signed, value=value)


def votes_in(group: GroupOfNodes, voter: str) -> set[tuple[bytes, int, bytes]]:
    """Return all that this voter has ever signed as votes."""
    bodies = [
        msgspec.msgpack.decode(body, type=msg.VoteBody)
        for signer, kind, body in sorted(group.table.signed)
        if (signer, kind) == (voter, evidence.VOTE)
    ]
    return {(body.head, body.attempt, body.value) for body in bodies}


def test_two_values_of_one_attempt_get_one_vote_and_are_a_proof() -> None:
    """F2: the leader's second value is never voted for; both signatures convict it before all members."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    leader, message = proposal_of(group)
    other = next(peer for peer in "ABC" if peer != leader)
    group.run(0.0105)  # the first proposal has come, the votes have not
    group.event(other, events.Received(leader, other_value(group, leader, message)))
    group.run(0.05)
    assert (message.value.previous, 0, message.value.hash) in votes_in(group, other)
    slots = [(head, attempt) for head, attempt, _ in votes_in(group, other)]
    assert len(slots) == len(set(slots))
    accused = [a for a in group.machines[other].accused if a.peer == leader]
    assert accused and accused[0].proof is not None
    assert all(leader in m.node._applicants.proofs for p, m in group.machines.items() if p in "ABC")


def test_a_convicted_liar_is_out_of_the_next_head() -> None:
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    head = group.head("A")
    bodies = [msg.VoteBody(head.hash, 7, bytes([i]) * 32, group.member("D")) for i in range(2)]
    first, second = (group.sign("D", evidence.VOTE, body) for body in bodies)
    for vote in (first, second):
        group.event("A", events.Received("D", msg.VoteMessage(vote)))
    group.run_to(4, "ABC")
    assert not any(member.peer == "D" for member in group.head("A").members)


def test_an_owner_with_two_faces_is_convicted() -> None:
    """F2, R13: what an owner merges is signed, so that many faces show who lied."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    owner, _, message = group.run_until_sent(msg.ResultsMessage)
    group.run(0.02)
    victim = next(peer for peer in "ABC" if peer != owner)
    body = msgspec.msgpack.decode(message.results.body, type=msg.ResultsBody)
    hashes = tuple(blake3(b"forged" + name).digest() for name in body.hashes)
    forged = group.sign(owner, evidence.RESULTS, msgspec.structs.replace(body, hashes=hashes))
    group.event(victim, events.Received(owner, msg.ResultsMessage(body.head, forged)))
    group.run(0.05)
    assert [a.peer for a in group.machines[victim].accused] == [owner]
    group.run_to(2)


def test_a_value_that_does_not_follow_from_its_roster_gets_no_vote() -> None:
    """F7: the leader's proposal names other members than the roster leads to."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage)
    leader, message = proposal_of(group)
    group.run(0.3)
    victim = next(peer for peer in "ABC" if peer != leader)
    body = msgspec.msgpack.decode(message.proposal.body, type=msg.ProposalBody)
    value = msgspec.structs.replace(message.value, members=(group.member(leader),))
    signed = group.sign(leader, evidence.PROPOSAL, msgspec.structs.replace(body, value=value.hash))
    packed = msgspec.structs.replace(message, proposal=signed, value=value)
    found = group.give(victim, packed, leader)
    assert any(isinstance(action, actions.Accuse) and action.peer == leader for action in found)
    assert not any(value.hash == choice for _, _, choice in votes_in(group, victim))


def test_a_proposal_needs_the_promises_of_a_quorum_and_its_forced_value() -> None:
    """F2: the voters check the promises themselves."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    first = leader_of(group.head("A"), group.head("A").hash, 0).peer
    group.crash(first)
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage)
    leader, message = proposal_of(group)
    group.run(0.3)
    (victim,) = set("ABC") - {first, leader}
    assert len(message.promises) == 2
    for promises in (message.promises[:1], ()):
        found = group.give(victim, msgspec.structs.replace(message, promises=promises), leader)
        assert any(isinstance(a, actions.Accuse) and "too few voters" in a.reason for a in found)
    assert votes_in(group, victim) == {vote for vote in votes_in(group, victim) if vote[0] != message.value.previous}


@pytest.mark.parametrize("seconds", [2.0, 0.05])
def test_a_voter_votes_only_for_what_its_own_state_hashes_to(seconds: float) -> None:
    """While it has not built the state, or if its machine computes another one, it does not vote (and says so)."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    victim = next(peer for peer in "ABC" if peer != leader_of(head, head.hash, 0).peer)
    other = blake3(b"another build of torch").digest()
    group.build = lambda peer, state: (seconds, other if seconds < 1 else state) if peer == victim else (0.05, state)
    group.run_to(2, [peer for peer in "ABC" if peer != victim])
    group.run(0.2)
    assert not any(voted == head.hash for voted, _, _ in votes_in(group, victim))
    assert bool(group.told(victim, "state_differs")) == (seconds < 1)
    group.run_to(3)  # it fetches what the others have certified


def test_a_proposal_may_not_rest_on_made_up_accepted_values() -> None:
    """F10, checked by the voters: a liar that leads cites an accepted value that no leader has ever signed."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    _, voter, third, message = group.lose_leader_after_votes()
    head = group.head(voter)
    later = attempt_of(head, head.hash, group.member(third), 10)
    made_up = msg.AcceptedValue(later - 1, message.value, Signed(b"", third, b""))
    promises = tuple(
        group.sign(peer, evidence.PROMISE, msg.PromiseBody(head.hash, later, group.member(peer), reported))
        for peer, reported in ((voter, None), (third, made_up))
    )
    signed = group.sign(third, evidence.PROPOSAL, msg.ProposalBody(head.hash, later, message.value.hash))
    found = group.give(voter, msg.ProposalMessage(signed, message.value, promises, message.support), third)
    assert any(isinstance(a, actions.Accuse) and "without evidence" in a.reason for a in found)


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_an_accepted_value_that_a_voter_made_up_does_not_count(mode: str) -> None:
    """F10: without the leader's signature for that attempt, or with the liar's own, it is void."""
    group = GroupOfNodes("ABC", mode=mode)
    group.run_to(1)
    node, head = group.machines["A"].node, group.head("A")
    made_up = msgspec.structs.replace(head, round=head.round + 1, previous=head.hash, members=(group.member("C"),))
    attempt = next(a for a in range(3) if leader_of(head, head.hash, a).peer != "C")
    body = msg.ProposalBody(head.hash, attempt, made_up.hash)
    for proposal in (Signed(b"", "C", b""), group.sign("C", evidence.PROPOSAL, body)):
        accepted = msg.AcceptedValue(attempt, made_up, proposal)
        assert not node._context.evidence.counts(accepted, head, head.hash, attempt + 1)
    mine = attempt_of(head, head.hash, group.member("C"), 0)
    signed = group.sign("C", evidence.PROPOSAL, msg.ProposalBody(head.hash, mine, made_up.hash))
    own = msg.AcceptedValue(mine, made_up, signed)
    # The liar did lead that attempt; then the value must still follow from a roster (see the next test).
    assert node._context.evidence.counts(own, head, head.hash, mine + 1)
    assert not node._context.evidence.counts(own, head, head.hash, mine)


def test_a_forced_value_must_follow_from_a_roster_too() -> None:
    """A hole that the model did not have: a liar signs a value of its own for an attempt that it leads, proposes it
    to no voter, and reports it as accepted in a later attempt. It would be forced, if values were not derived there
    as well."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage)
    leader, message = proposal_of(group)
    group.run(0.3)
    head = group.head(leader)
    liar, victim = (peer for peer in "ABC" if peer != leader)
    mine = attempt_of(head, head.hash, group.member(liar), 1)
    later = attempt_of(head, head.hash, group.member(leader), mine + 1)
    evil = msgspec.structs.replace(message.value, members=(group.member(liar),))
    proof = group.sign(liar, evidence.PROPOSAL, msg.ProposalBody(head.hash, mine, evil.hash))
    accepted = msg.AcceptedValue(mine, evil, proof)
    promises = tuple(
        group.sign(peer, evidence.PROMISE, msg.PromiseBody(head.hash, later, group.member(peer), reported))
        for peer, reported in ((leader, None), (liar, accepted))
    )
    signed = group.sign(leader, evidence.PROPOSAL, msg.ProposalBody(head.hash, later, evil.hash))
    forced = msg.ProposalMessage(signed, evil, promises, message.support)
    found = group.give(victim, forced, leader)
    assert any(isinstance(a, actions.Accuse) and "do not follow" in a.reason for a in found)


def test_what_may_have_been_chosen_is_finished_by_the_next_leader() -> None:
    """Phase 1: the leader and one member have voted, and the leader may have committed; the next leader proposes the
    same."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    leader, voter, third, message = group.lose_leader_after_votes()
    group.heal()
    group.run_to(3, voter + third)
    chosen = {head.hash for head in group.machines[third].committed if head.round == 2}
    assert chosen == {message.value.hash} and leader not in (voter, third)


def test_a_proposal_of_another_value_than_the_promises_force_gets_no_vote() -> None:
    """Phase 1, checked by the voters: the next leader is a liar and proposes a value of its own."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    _, voter, third, message = group.lose_leader_after_votes()
    head = group.head(voter)
    later = attempt_of(head, head.hash, group.member(third), 10)
    accepted = group.machines[voter].node._round.instance.accepted
    promises = tuple(
        group.sign(peer, evidence.PROMISE, msg.PromiseBody(head.hash, later, group.member(peer), reported))
        for peer, reported in ((voter, accepted), (third, None))
    )
    other = msgspec.structs.replace(message.value, state_hash=blake3(b"other").digest())
    for value, refused in ((other, True), (message.value, False)):
        signed = group.sign(third, evidence.PROPOSAL, msg.ProposalBody(head.hash, later, value.hash))
        found = group.give(voter, msg.ProposalMessage(signed, value, promises, message.support), third)
        accused = [a.reason for a in found if isinstance(a, actions.Accuse)]
        assert any("promises force" in reason for reason in accused) == refused


def test_no_attempt_is_led_twice() -> None:
    """F18: neither after a failure nor after a restart."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    leader, _, _ = group.run_until_sent(msg.PlanMessage)
    group.isolate(leader)
    group.run(0.5)
    group.crash(leader)
    group.start(leader)
    group.run(40.0)
    led: list[tuple[bytes, int]] = []
    for signer, kind, body in sorted(group.table.signed):
        if (signer, kind) == (leader, "plan"):
            plan = msgspec.msgpack.decode(body)
            led.append((plan["head"], plan["attempt"]))
    assert len(led) == len(set(led)) and not group.accusations()


def test_a_promise_is_on_disk_before_it_is_sent() -> None:
    """F19: the answer waits for `Persisted`; a restarted voter still refuses lower attempts."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0)
    victim = next(peer for peer in "ABC" if peer != leader.peer)
    attempt = attempt_of(head, head.hash, leader, 50)
    prepare = msg.PrepareMessage(head.hash, attempt, (head.term, head.boot, head.round))
    node = group.machines[victim].node
    found = node.step(group.now, events.Received(leader.peer, prepare))
    kept = [action for action in found if isinstance(action, actions.Persist)]
    assert kept and not any(isinstance(a, actions.Send) and isinstance(a.message, msg.PromiseMessage) for a in found)
    found = node.step(group.now, events.Persisted(kept[-1].id))
    assert any(isinstance(a, actions.Send) and isinstance(a.message, msg.PromiseMessage) for a in found)
    group.machines[victim].records |= {action.key: action.record for action in kept}
    again = group.start(victim)
    assert again.node._round.instance.ballot.promised == attempt


def test_a_damaged_or_missing_disk_makes_another_voter() -> None:
    """F19: what may have forgotten a vote is not the same voter."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    before = group.member("C")
    group.crash("C")
    group.machines["C"].records["ballot"] = b"torn"
    group.start("C")
    assert group.member("C") != before and group.member("C").peer == "C"
    group.crash("B")
    kept = group.member("B")
    group.start("B")
    assert group.member("B") == kept


def test_a_voter_whose_disk_was_lost_forgets_no_vote() -> None:
    """F19: its vote made a value chosen that no peer has committed. As the same voter it could help to choose another
    one; it is another voter, so the group waits for the one that knows."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    leader, voter, third, message = group.lose_leader_after_votes()
    group.crash(voter)
    group.start(voter, wiped=True)
    group.heal()
    for peer in (voter, third):
        group.event(peer, events.PeerDown(leader))
    group.run(60.0)
    group.start(leader)
    group.run_to(3)
    after = {head.hash for machine in group.machines.values() for head in machine.committed if head.round == 2}
    assert after == {message.value.hash}


def test_actions_wait_in_order_for_the_records_before_them() -> None:
    out = Output("A")
    out.send("B", msg.AskChainMessage(()))
    out.persist("ballot", b"1")
    out.send("B", msg.AskChainMessage((b"1",)))
    out.timer("poll", 1.0)
    out.persist("ballot", b"2")
    out.send("B", msg.AskChainMessage((b"2",)))
    assert [type(action).__name__ for action in out.take()] == ["Send", "Persist", "SetTimer", "Persist"]
    out.persisted(1)
    assert out.take() == [actions.Send("B", msg.AskChainMessage((b"1",)))]
    out.persisted(99)
    assert out.take() == [actions.Send("B", msg.AskChainMessage((b"2",)))]


def test_votes_below_the_kept_window_are_refused() -> None:
    """F21: dropping an old vote must not let a second one of that attempt in."""
    group = GroupOfNodes("A")
    signed = group.sign("A", "x", msg.AskChainMessage(()))
    cast: dict[int, tuple[bytes, Signed]] = {}
    for attempt in range(ATTEMPTS_KEPT + 2):
        assert record_once(cast, attempt, b"a", signed) is None
    assert record_once(cast, 0, b"b", signed) is None and 0 not in cast
    assert record_once(cast, ATTEMPTS_KEPT, b"b", signed) is signed


def test_a_ballot_promises_and_votes_once() -> None:
    ballot = Ballot().vote(3, b"v")
    assert ballot is not None and ballot.promised == 3
    assert ballot.vote(3, b"w") is None and ballot.vote(3, b"v") == ballot and ballot.vote(2, b"v") is None
    assert ballot.promise(3) is None, "a promise after the vote would hide it from the leader"
    later = ballot.promise(5)
    assert later is not None and (later.voted_attempt, later.voted) == (3, b"v")


def test_a_contradiction_that_is_none_proves_nothing() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head, judge = group.head("A"), group.machines["A"].node._context.evidence
    one = group.vote("B", head, 1, head)
    for other in (one, group.vote("B", head, 2, head), group.vote("C", head, 1, group.head("A"))):
        with pytest.raises(ProtocolViolation):
            judge.culprit(msg.Contradiction(evidence.VOTE, one, other))
    two = group.sign("B", evidence.VOTE, msg.VoteBody(head.hash, 1, bytes(32), group.member("B")))
    assert judge.culprit(msg.Contradiction(evidence.VOTE, one, two)) == "B"
    reborn = msg.VoteBody(head.hash, 1, bytes(32), msgspec.structs.replace(group.member("B"), session="new"))
    with pytest.raises(ProtocolViolation):
        judge.culprit(msg.Contradiction(evidence.VOTE, one, group.sign("B", evidence.VOTE, reborn)))
