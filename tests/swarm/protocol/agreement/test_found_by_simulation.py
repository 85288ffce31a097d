"""Faults that the simulator has found, each as the shortest directed schedule that shows it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import BallotRecord
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.electorate import attempt_of, leader_of
from swarm.protocol.head import Member, Sponsor, Sponsorship
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes, contribution_body, plan_in


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_regroup_before_the_group_has_begun_begins_nothing(mode: str) -> None:
    """The coordinator answered itself, and made itself the only member of a group without weights."""
    group = GroupOfNodes("ABC", mode=mode)
    group.isolate(COORDINATOR)
    group.run(1.0)
    group.event(COORDINATOR, events.RegroupRequested())
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
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(0.5)  # the old C has answered
    group.crash("C")
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None and coordinator.inquiry is not None and old in coordinator.inquiry.told
    reborn = msgspec.structs.replace(coordinator.inquiry.told[old], voter=Member("C", "reborn"))
    group.event(COORDINATOR, events.Received("C", reborn))
    group.run(5.0)
    starts = [
        msgspec.msgpack.decode(body, type=msg.StartBody).head
        for signer, kind, body in sorted(group.table.signed)
        if kind == evidence.START
    ]
    latest = max(starts, key=lambda head: head.term)
    assert latest.term == 2 and latest.members == (Member("C", "reborn"),)


def test_a_bad_contribution_in_a_promise_is_held_against_its_sender() -> None:
    """The leader reads all promises when the last one comes; that one's sender was accused, and the attempt hung."""
    group = GroupOfNodes("ABCD")
    group.run_to(1)
    head = group.head("A")
    first, second = (leader_of(head, head.hash, attempt) for attempt in (0, 1))
    liar, last = sorted(set(head.members) - {first, second})

    def bad(source: str, message: msg.Message) -> msg.Message:
        if source != liar.peer or not isinstance(message, msg.PromiseMessage) or message.plan is None:
            return message
        body = contribution_body(liar, plan_in(message.plan))
        greedy = msgspec.structs.replace(body, steps=body.steps * 1000, samples=body.samples * 1000)
        return msgspec.structs.replace(message, contribution=group.sign(liar.peer, CONTRIBUTION_KIND, greedy))

    group.change = bad
    group.run(0.1)  # all have the plan of the first leader, which now dies
    group.crash(first.peer)
    for peer in (second.peer, liar.peer, last.peer):
        group.event(peer, events.PeerDown(first.peer))
    group.run_to(2, [second.peer, last.peer])
    assert {accused for _, accused, _ in group.accusations()} == {liar.peer}


def test_a_leader_without_any_peer_that_may_work_gives_its_attempt_up() -> None:
    """All that are present are proved liars: there is no plan to make."""
    group = GroupOfNodes("AB")
    group.run_to(1)
    node = group.machines["A"].node
    head = group.head("A")
    for peer in "AB":
        bodies = [msg.VoteBody(head.hash, 7, bytes([i]) * 32, group.member(peer)) for i in range(2)]
        proof = msg.Contradiction(evidence.VOTE, *(group.sign(peer, evidence.VOTE, body) for body in bodies))
        for machine in group.machines.values():
            if machine.peer != COORDINATOR:
                machine.node._applicants.take_proof(proof)
    group.run(20.0)
    failed = [told["reason"] for peer in "AB" for told in group.told(peer, "attempt_failed")]
    assert "no peer that may work is present" in failed and set(node._applicants.proofs) == {"A", "B"}


def scatter(group: GroupOfNodes, attempts: dict[str, int]) -> None:
    """Let each of these peers restart with a promise to an attempt of its own: each waits for another leader."""
    for peer in attempts:
        group.crash(peer)
    for peer, attempt in sorted(attempts.items()):
        head = group.head(peer)
        mine = attempt_of(head, head.hash, group.member(peer), attempt)
        record = BallotRecord(head.hash, Ballot(promised=mine), None, None)
        group.machines[peer].records["ballot"] = encode(record)
        group.start(peer)


@pytest.mark.parametrize(
    ("attempts", "config"),
    [
        ({"B": 22, "D": 13, "E": 22}, {"min_peers": 5}),
        ({"A": 24, "B": 7, "D": 19}, {"min_peers": 4}),
    ],
)
def test_leaders_that_promised_themselves_do_not_duel(attempts: dict[str, int], config: dict[str, Any]) -> None:
    """Each had promised a later attempt than the leaders for which the others waited, and none was told: no commit
    for a minute with all up."""
    peers = "ABCDE"[: config["min_peers"]]
    group = GroupOfNodes(peers, **config)
    group.run_to(1)
    scatter(group, attempts)
    before, began = group.round("A"), group.now
    group.run(60.0, lambda: all(group.round(peer) > before for peer in peers))
    assert group.now - began < 20.0
    group.check()


def test_a_peer_that_waits_for_ever_later_attempts_stops_no_group() -> None:
    """A voter's word moves the others once in as many turns as there are members, and no leader that makes progress."""
    quiet, busy = GroupOfNodes("ABCD"), GroupOfNodes("ABCD")
    for group in (quiet, busy):
        group.run_to(1)
    counter = itertools.count(1000)

    def restless(source: str, message: msg.Message) -> msg.Message:
        if source == "D" and isinstance(message, msg.StatusMessage):
            return msgspec.structs.replace(message, attempt=next(counter) * 4)
        return message

    busy.change = restless
    quiet.run(30.0)
    busy.run(30.0)
    assert busy.round("A") >= 0.6 * quiet.round("A")


def test_a_value_is_built_from_what_its_voters_have_on_disk() -> None:
    """The owners of its slices are gone; a voter that restarted holds it, and was never asked."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    leader, voter, third, message = group.lose_leader_after_votes()
    group.crash(third)
    group.start(third)  # a new process has no slices
    head = group.head(voter)
    later = attempt_of(head, head.hash, group.member(third), 10)
    reported = group.machines[voter].node._round.instance.accepted
    promises = tuple(
        group.sign(peer, evidence.PROMISE, msg.PromiseBody(head.hash, later, group.member(peer), accepted))
        for peer, accepted in ((voter, reported), (third, None))
    )
    outsider = Member("Z", "Z0")
    proof = group.sign("Z", evidence.PROMISE, msg.PromiseBody(head.hash, later, outsider, reported))
    signed = group.sign(third, evidence.PROPOSAL, msg.ProposalBody(head.hash, later, message.value.hash))
    proposal = msg.ProposalMessage(signed, message.value, (*promises, proof), message.support)
    found = group.give(third, proposal, third)
    (build,) = [action for action in found if isinstance(action, actions.Build)]
    assert voter in build.holders and leader in build.holders and "Z" not in build.holders


def test_one_invite_is_one_member_from_the_first_head_on() -> None:
    """Two keys of one invite began the group, and their invite was not noted, so that a third one came in later."""
    group = GroupOfNodes("ABC", min_peers=3)
    for name in "XY":
        group._config["credential"] = b"of liars"
        group.start(name)
    group.run_to(1, "ABC")
    peers = {member.peer for member in group.head("A").members}
    assert len(peers & set("XY")) == 1
    invite = Sponsor("of liars", 1)
    assert group.head("A").sponsored == tuple(Sponsorship(invite, peer) for peer in sorted(peers & set("XY")))


def test_a_question_costs_a_slow_group_no_turn() -> None:
    """The operator's regroup of a group that was only slow ended the attempt under way, and cost eleven seconds."""
    group = GroupOfNodes("ABC", train_s=2.0)
    group.run_to(2)
    group.run_until_sent(msg.PlanMessage)
    group.run(0.5)
    before, began = group.round("A"), group.now
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(30.0, lambda: all(group.round(peer) > before for peer in "ABC"))
    assert group.now - began < 5.0
    group.run(5.0)
    assert group.told(COORDINATOR, "regroup_withdrawn") and group.head("A").term == 1


def test_a_state_that_is_gone_is_not_waited_for_once_there_is_a_newer_one() -> None:
    """A peer that was behind asked for a state, in vain, while the group went on; it then backed off for seconds."""
    group = GroupOfNodes("ABC", finish_s=0.5)
    group.run_to(1)
    group.isolate("C")
    group.run_to(2, "AB")
    group.serves = False
    group.heal()
    group.run(0.9, lambda: bool(group.machines["C"].node._chain._fetching))
    group.run_to(3, "AB")
    node = group.machines["C"].node
    group.run(10.0, lambda: node._chain._failed != b"")
    failed = node._chain._failed
    link = group.machines["A"].node._chain.link(group.head("A").hash)
    assert link is not None and link.head.state_hash != failed
    assert node._chain._fetching in (b"", link.head.state_hash)
    found = group.give("C", msg.ChainMessage((link,)), "A")
    assert node._chain._fetching == link.head.state_hash or any(isinstance(a, actions.Fetch) for a in found)


def test_leader_and_voters_choose_alike_between_two_values_of_one_attempt() -> None:
    """A liar that led an attempt had shown two values. The leader took the first one that it heard of, the voters the
    one of the first voter, and the leader was accused."""
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(1)
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage)
    liar, _, message = group.run_until_sent(msg.ProposalMessage)
    group.run(0.3)
    leader, other = sorted(set("ABC") - {liar})
    head, node = group.head(leader), group.machines[leader].node
    open_round = node._round
    open_round.leader.begin()
    attempt = open_round.leader._attempt
    assert attempt is not None
    values = [message.value, msgspec.structs.replace(message.value, state_hash=bytes(32))]
    body = msgspec.msgpack.decode(message.proposal.body, type=msg.ProposalBody)
    heard = [(other, values[0]), (liar, values[1]), (COORDINATOR, None), (leader, None)]
    for peer, value in sorted(
        heard, key=lambda entry: entry[0] != max(other, liar)
    ):  # the last voter in order comes first
        accepted = None
        if value is not None:
            proposal = msgspec.structs.replace(body, value=value.hash)
            accepted = msg.AcceptedValue(body.attempt, value, group.sign(liar, evidence.PROPOSAL, proposal))
        promise = msg.PromiseBody(head.hash, attempt.number, group.member(peer), accepted)
        signed = group.sign(peer, evidence.PROMISE, promise)
        open_round.leader.promise(peer, msg.PromiseMessage(signed, support=message.support if accepted else None))
    assert attempt.proposal is not None
    forced = node._context.evidence.justified(attempt.proposal.promises, head, head.hash, attempt.number).accepted
    assert forced is not None and forced.value == attempt.proposal.value


def test_a_required_coordinator_does_not_regroup_a_group_that_goes_on() -> None:
    """The operator who regroups again and again kept newcomers out for ever: a new term begins without learners."""
    group = GroupOfNodes("ABC", mode="required")
    group.run_to(2)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(5.0)
    assert group.told(COORDINATOR, "regroup_withdrawn") and group.head("A").term == 1
    group.event(COORDINATOR, events.RegroupRequested(without=("C",)))
    group.run_to(group.round("A") + 2, "AB")
    assert group.head("A").term == 2 and {member.peer for member in group.head("A").members} == set("AB")


def test_a_promise_whose_value_does_not_follow_from_what_it_brings_is_refused() -> None:
    """A liar that had led the attempt before reported a value of its own with the roster of another one. The leader
    proposed it, and was accused by the voters."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage)
    liar, _, message = group.run_until_sent(msg.ProposalMessage)
    group.run(0.3)
    leader = sorted(set("ABC") - {liar})[0]
    head, open_round = group.head(leader), group.machines[leader].node._round
    open_round.leader.begin()
    attempt = open_round.leader._attempt
    assert attempt is not None
    body = msgspec.msgpack.decode(message.proposal.body, type=msg.ProposalBody)
    for value, counts in ((msgspec.structs.replace(message.value, members=()), False), (message.value, True)):
        proof = group.sign(liar, evidence.PROPOSAL, msgspec.structs.replace(body, value=value.hash))
        accepted = msg.AcceptedValue(body.attempt, value, proof)
        promise = msg.PromiseBody(head.hash, attempt.number, group.member(liar), accepted)
        packed = msg.PromiseMessage(group.sign(liar, evidence.PROMISE, promise), support=message.support)
        found = group.give(leader, packed, liar)
        assert any(isinstance(action, actions.Accuse) for action in found) != counts
        assert (group.member(liar) in attempt.promises) == counts


def test_a_member_that_submits_rubbish_is_not_waited_for() -> None:
    """It was asked again and again until the plan's time was over."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    head = group.head("A")
    leader = leader_of(head, head.hash, 0).peer
    liar = next(peer for peer in "ABC" if peer != leader)

    def greedy(source: str, message: msg.Message) -> msg.Message:
        if source != liar or not isinstance(message, msg.SubmitMessage):
            return message
        body = msgspec.msgpack.decode(message.contribution.body, type=Contribution)
        more = msgspec.structs.replace(body, steps=body.steps * 1000, samples=body.samples * 1000)
        return msgspec.structs.replace(message, contribution=group.sign(liar, CONTRIBUTION_KIND, more))

    group.change, began = greedy, group.now
    group.run_to(2)
    assert group.now - began < 4.0
    assert {accused for _, accused, _ in group.accusations()} == {liar}


def test_a_newcomer_in_an_adopted_plan_must_have_asked_the_leader_that_names_it() -> None:
    """The leader that had taken the newcomer's request was gone; the next one adopted its plan, and each roster that it
    made named a peer that had not asked to join."""
    group = GroupOfNodes("ABC")
    group.run_to(1)
    group.start("D")
    group.run(20.0, lambda: any(t == "D" and isinstance(m, msg.PlanMessage) for _, t, m in group.sent))
    leader, order = next((s, m) for s, t, m in group.sent if t == "D" and isinstance(m, msg.PlanMessage))
    attempt = group.machines[leader].node._round.leader._attempt
    assert attempt is not None and order.plan == attempt.signed_plan
    newcomer, join = group.member("D"), attempt.joins.pop(group.member("D"))
    signed = group.sign("D", CONTRIBUTION_KIND, contribution_body(newcomer, plan_in(order.plan)))
    for request in (None, join):
        group.give(leader, msg.SubmitMessage(order.head, signed, request), "D")
        assert (newcomer in attempt.contributions) == (newcomer in attempt.joins) == (request is not None)


def test_a_state_is_fetched_from_newcomers_too() -> None:
    """The only member that had it lost its disk; two newcomers that waited for the next round had it, and were never
    asked."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.isolate("C")
    group.run_to(3, "AB")
    group.start("D")
    group.heal()
    group.lost = lambda source, target, message: "C" in (source, target) and not {"A", "B"}.isdisjoint((source, target))
    group.run(5.0, lambda: group.round("D") >= 3)
    link = group.machines["D"].node._chain.link(group.head("D").hash)
    assert link is not None
    group.event("C", events.PeerUp("D"))
    path = group.machines["D"].node._chain.after((group.head("C").hash,))
    found = group.give("C", msg.ChainMessage(path), "D")
    (fetch,) = [action for action in found if isinstance(action, actions.Fetch)]
    assert "D" in fetch.holders and COORDINATOR not in fetch.holders


@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_restored_coordinator_that_restarts_waits_for_the_operator_still(mode: str) -> None:
    """A restart without the word of the operator, before the regroup, made it vote with the old disk."""
    group = GroupOfNodes("ABC", mode=mode)
    group.run_to(2)
    group.crash(COORDINATOR)
    assert group.start(COORDINATOR, restored=True).node._context.mute
    group.run(0.1)
    group.crash(COORDINATOR)
    assert group.start(COORDINATOR).node._context.mute
    group.run(1.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(30.0, lambda: group.head("A").term > 1)
    assert group.head("A").term > 1000 and not group.machines[COORDINATOR].node._context.mute
    group.run(0.1)
    group.crash(COORDINATOR)
    assert not group.start(COORDINATOR).node._context.mute
