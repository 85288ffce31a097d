"""Heads count by certificate, never by words; a node fetches first and then leaves (F1, F4, F5b, F15)."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from swarm.protocol.agreement import actions, chain, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from tests.swarm.protocol.agreement.group import COORDINATOR, GroupOfNodes


def sends(found: list[actions.Action], kind: type) -> list[actions.Send]:
    return [action for action in found if isinstance(action, actions.Send) and isinstance(action.message, kind)]


@pytest.mark.parametrize("liars", ["", "B", "BC"])
def test_a_head_that_others_only_speak_of_is_not_followed(liars: str) -> None:
    """F1: two of three liars sign votes for a head of their own, but one of them is no member of the head before."""
    group = GroupOfNodes("ABCD", min_peers=3)
    group.run_to(1, "ABC")
    head = group.head("A")
    false = msgspec.structs.replace(
        head, round=head.round + 1, previous=head.hash, members=(group.member("B"),), state_hash=bytes(32)
    )
    votes = [group.vote(liar, head, 0, false) for liar in [*liars[:1], "D"][: len(liars)]]
    found = group.give("A", msg.ChainMessage((msg.ChainLink(false, votes=tuple(votes)),)), "B")
    assert group.head("A") == head
    assert any(isinstance(action, actions.Accuse) and action.peer == "B" for action in found)
    assert not any(isinstance(action, actions.Fetch | actions.CommitHead) for action in found)


def test_a_chain_with_a_gap_or_a_forged_endorsement_does_not_count() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    head = group.head("A")
    later = msgspec.structs.replace(head, round=head.round + 5, previous=bytes(32))
    votes = tuple(group.vote(peer, head, 0, later) for peer in "BC")
    group.give("A", msg.ChainMessage((msg.ChainLink(later, votes=votes),)), "B")
    forged = group.sign("B", evidence.ENDORSEMENT, msg.EndorsementBody(later.hash))
    group.give("A", msg.ChainMessage((msg.ChainLink(later, endorsement=forged),)), "B")
    assert group.head("A") == head


def test_votes_of_two_attempts_are_no_certificate() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    value = msgspec.structs.replace(head, round=head.round + 1, previous=head.hash)
    votes = (group.vote("B", head, 0, value), group.vote("C", head, 1, value))
    found = group.give("A", msg.ChainMessage((msg.ChainLink(value, votes=votes),)), "B")
    assert group.head("A") == head and any(isinstance(action, actions.Accuse) for action in found)


def test_a_member_that_missed_rounds_fetches_first_and_then_leaves() -> None:
    """F5b, F4: it stands at its old head, with that head's weights, until the new state is here."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.isolate("C")
    group.run_to(4, "AB")
    behind = group.head("C")
    group.serves = False
    group.heal()
    group.run(3.0)
    assert group.head("C") == behind
    group.serves = True
    group.run(20.0)
    assert group.round("C") > 4
    group.check()


@pytest.mark.parametrize(("build_s", "works"), [(0.5, True), (0.5, False), (1000.0, True)])
def test_a_certified_state_that_is_being_built_is_fetched_only_if_that_fails(build_s: float, works: bool) -> None:
    """Each member that built more slowly than a majority voted fetched the whole result that it had nearly built."""
    group = GroupOfNodes("ABC")
    group.build = lambda peer, state: (build_s if peer == "C" else 0.05, state if works or peer != "C" else None)
    group.run_to(4)
    fetched = not works or build_s > 4.0
    assert set(group.fetches) == ({"C"} if fetched else set())
    assert group.now < 60.0 and not group.accusations()


def test_a_build_that_does_not_end_holds_up_no_group_that_needs_its_member() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    slow, other = sorted(set("ABC") - {leader})
    group.build = lambda peer, state: (1000.0 if peer == slow else 0.05, state)
    group.run(20.0, lambda: group.round(leader) == group.round(other) == 2)
    assert group.round(slow) == 1 and group.head(leader) == group.head(other)
    group.crash(leader)
    for peer in (slow, other, COORDINATOR):
        group.event(peer, events.PeerDown(leader))
    group.build = lambda peer, state: (0.05, state)
    group.run_to(4, slow + other, seconds=60.0)
    assert set(group.fetches) == {slow}


def test_a_long_chain_comes_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large group a link has many votes: 64 of them would be more than a call holds, and their signatures would
    stop the reader's loop."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.isolate("C")
    group.run_to(12, "AB")
    links = group.machines["A"].node._chain.after((group.head("C").hash,))
    size = len(encode(links[0]))
    monkeypatch.setattr(chain, "PAGE_BYTES", int(2.5 * size))
    group.heal()
    sent = len(group.sent)
    goal = group.round("A")
    group.run(20.0, lambda: group.round("C") >= goal)
    pages = [m.links for _, target, m in group.sent[sent:] if target == "C" and isinstance(m, msg.ChainMessage)]
    assert max(map(len, pages)) == 2 and group.round("C") >= goal
    monkeypatch.setattr(chain, "PAGE_BYTES", 1)
    assert len(group.machines["A"].node._chain.after(())) == 1, "a single link goes, whatever its size"


def test_an_empty_position_moves_no_node() -> None:
    """F1: numbers are no reason; they only lead to a question."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    term, boot, round = position_of(head)
    status = msg.StatusMessage((term, boot, round + 1000), bytes(32), group.member("B"))
    found = group.give("A", status, "B")
    assert [send.peer for send in sends(found, msg.AskChainMessage)] == ["B"]
    assert group.head("A") == head


def test_a_status_is_small_and_a_poll_tells_few_peers() -> None:
    """F15: idle traffic of one member does not grow with the group."""
    names = [f"{i:03d}" for i in range(40)]
    group = GroupOfNodes("AB")
    group.run_to(1)
    big = GroupOfNodes(names, train_s=5.0)
    big.run_to(1)
    for found in (group, big):
        found.sent.clear()
        found.run(1.0)
        told = [message for source, _, message in found.sent if source == found.head("W").members[0].peer]
        idle = [message for message in told if isinstance(message, msg.StatusMessage) and not message.answer]
        assert len(idle) <= 4 * 2 and all(len(encode(message)) < 200 for message in idle)


def test_a_newcomer_is_shown_the_chain_from_the_start_of_term_or_an_endorsement() -> None:
    group = GroupOfNodes("ABC", train_s=0.5)
    group.run_to(40)
    group.sent.clear()
    group.start("D")
    group.run(30.0)
    assert group.head("D").has(group.member("D"))
    pages = [message for _, target, message in group.sent if target == "D" and isinstance(message, msg.ChainMessage)]
    assert pages[0].links[0].endorsement is not None and len(pages[0].links) < 40
    group.check()


def test_where_the_coordinator_is_required_its_vote_vouches_for_all_before() -> None:
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(3)
    link = group.machines["A"].node._chain.link(group.head("A").hash)
    assert link is not None and COORDINATOR in {vote.signer for vote in link.votes}
    alone = GroupOfNodes("ABC", mode="required")
    alone.table.signed = group.table.signed
    alone.run(0.5)  # before its own first commit
    alone.give("A", msg.ChainMessage((link,)), "B")
    assert alone.machines["A"].node._chain.known[0] == link.head.hash


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_round_takes_as_many_votes_and_certificates_as_it_has_voters(mode: str) -> None:
    """Votes went from all to all: 300 of the 507 calls of a round of sixteen."""
    group = GroupOfNodes("ABCDEFGHIJKLMNOP", mode=mode)
    group.run_to(2)
    group.sent.clear()
    group.run_to(5)
    rounds = {message.value.round for _, _, message in group.sent if isinstance(message, msg.ProposalMessage)}
    sent = Counter(type(message) for source, target, message in group.sent if source != target)
    assert len(rounds) == 3
    assert sent[msg.VoteMessage] <= 3 * 17 * len(rounds) and sent[msg.ChainMessage] <= 17 * len(rounds)
    assert not sent[msg.AskChainMessage], "a certificate comes before the plan of the next leader"


@pytest.mark.parametrize("is_known", [False, True])
def test_a_certificate_reaches_all_where_the_next_leader_is_dead(is_known: bool) -> None:
    """Its place takes the present leader, if it knows; else all voters send their votes to all."""
    group = GroupOfNodes("ABCDE")
    group.run_to(1)
    _, _, proposal = group.run_until_sent(msg.ProposalMessage)
    dead = leader_of(proposal.value, proposal.value.hash, 0).peer
    group.crash(dead)
    alive = sorted(set("ABCDE") - {dead})
    for peer in alive if is_known else ():
        group.event(peer, events.PeerDown(dead))
    group.run_to(2, alive, seconds=0.2 if is_known else 2.0)
