"""Members, learners, owners and ledger follow from the roster, whoever leads (F7, F8, F9, F14)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import Mode
from swarm.protocol.agreement.messages import Measurements
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import (
    Electorate,
    attempt_of,
    leader_of,
    owners_of,
    room_for_newcomers,
)
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.agreement.rules.sponsors import Sponsors
from swarm.protocol.agreement.rules.succession import MISSED_MAX, Succession
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Absence, Head, Learner, Member, Sponsor, Sponsorship
from swarm.protocol.ledger import count
from swarm.protocol.plan import PLAN_KIND
from swarm.protocol.roster_room import RosterRoom, bytes_of
from tests.swarm.protocol.agreement.group import GENESIS, WORK, GroupOfNodes, contribution_body


def members(names: str) -> tuple[Member, ...]:
    return tuple(Member(name, f"{name}0") for name in names)


def head_of(names: str, **changes: object) -> Head:
    """Return a head of these members."""
    fields = {"members": members(names), "term": 1, "witness": Member("W", "W0")} | changes
    return msgspec.structs.replace(GENESIS, **fields)


class Scene:
    """Rosters of a head, made by whichever member leads the attempt."""

    def __init__(self, head: Head, work: Work = WORK, **config: Any) -> None:
        self.group, self.work = GroupOfNodes("A", work=work, **config), work
        self.head, self.name = head, head.hash
        self.succession = Succession(self.group.machines["A"].node._context)

    def roster(
        self,
        present: str,
        leader: str = "",
        joins: str = "",
        asked: tuple[Signed, ...] = (),
        turned: bool = False,
        clients: str = "",
        told: Mapping[str, Measurements] | None = None,
    ) -> OpenedRoster:
        """Open the roster of these contributors; `joins` are those of them that ask to join, or `asked` their requests.
        `turned`: the contributions stand in reverse order. `clients` say that they cannot be dialled; `told`: what each
        has measured."""
        attempt = attempt_of(self.head, self.name, Member(leader, f"{leader}0"), 0) if leader else 0
        signer = leader_of(self.head, self.name, attempt).peer
        measured = {member: (told or {}).get(member.peer, Measurements()) for member in members(present)}
        plan = self.work.plan(self.head, attempt, measured, ())
        signed_plan = self.group.sign(signer, PLAN_KIND, plan)
        bodies = [contribution_body(member, plan) for member in members(present)]
        bodies = [msgspec.structs.replace(b, client=True) if b.member.peer in clients else b for b in bodies]
        contributions = [self.group.sign(body.member.peer, "contribution", body) for body in bodies]
        body = msg.RosterBody(
            head=self.name,
            attempt=attempt,
            plan=plan.hash,
            contributions=tuple(contributions[:: -1 if turned else 1]),
            joins=asked or tuple(self.join(member) for member in members(joins)),
        )
        signed = self.group.sign(signer, evidence.ROSTER, body)
        return self.succession.roster(signed_plan, signed, self.head, self.name)

    def join(self, member: Member, head: bytes | None = None, credential: bytes = b"") -> Signed:
        body = msg.JoinBody(self.name if head is None else head, member, credential)
        return self.group.sign(member.peer, evidence.JOIN, body)

    def after(self, present: str, **more: Any) -> Head:
        return self.roster(present, **more).next


def test_a_newcomer_needs_its_own_signed_request() -> None:
    """F7 (i): a leader cannot name peers that did not ask."""
    scene = Scene(head_of("ABC"))
    with pytest.raises(ProtocolViolation, match="not asked to join"):
        scene.roster("ABCX")
    with pytest.raises(ProtocolViolation):
        scene.roster("ABCX", joins="Y")
    forged = scene.group.sign("A", evidence.JOIN, msg.JoinBody(scene.name, Member("X", "X0")))
    with pytest.raises(ProtocolViolation, match="another peer than it names"):
        scene.succession.join(forged, scene.head, scene.name)
    stale = scene.join(Member("X", "X0"), head=bytes(32))
    with pytest.raises(ProtocolViolation, match="another head"):
        scene.succession.join(stale, scene.head, scene.name)
    previous = scene.join(Member("X", "X0"), head=scene.head.previous)
    assert scene.succession.join(previous, scene.head, scene.name).member.peer == "X"


def test_a_newcomer_learns_for_two_merged_contributions() -> None:
    """F7 (iii): no vote, no slice, no lead before."""
    scene = Scene(head_of("ABC"))
    opened = scene.roster("ABCX", joins="X")
    assert opened.next.members == members("ABC")
    assert opened.next.learners == (Learner(Member("X", "X0"), 1),)
    assert "X" not in {owner.peer for owner in opened.owners}
    following = Scene(msgspec.structs.replace(opened.next, state_hash=bytes(32))).after("ABCX")
    assert following.members == members("ABCX") and following.learners == ()


def test_a_quorum_does_not_vote_its_own_members_out() -> None:
    """A, C and the witness were left of four. A's plan was older than C's return, so C was absent for the second time,
    and dropped by its own vote: of A, B and D two were gone for ever."""
    (a, b, c, d) = members("ABCD")
    head = head_of("ABCD", absent=(Absence(c, 1, d),))
    kept = Scene(head).after("A", leader="A")
    assert kept.members == (a, b, c, d) and kept.absent == (Absence(b, 1, a), Absence(c, 2, a), Absence(d, 1, a))
    assert Scene(head).after("ABD", leader="A").members == (a, b, d), "most of what stays has contributed"
    assert Scene(kept).after("AC", leader="C").members == (a, c), "it came back, and those that are gone leave"


def test_a_learner_keeps_its_count_for_some_missed_rounds() -> None:
    learner = Learner(Member("X", "X0"), 1, 2)
    kept = Scene(head_of("ABC", learners=(learner,))).after("ABC")
    assert kept.learners == (Learner(Member("X", "X0"), 1, 3),)
    tired = msgspec.structs.replace(learner, missed=MISSED_MAX)
    assert Scene(head_of("ABC", learners=(tired,))).after("ABC").learners == ()
    tired = msgspec.structs.replace(tired, merged=0)
    back = Scene(head_of("ABC", learners=(tired,))).after("ABCX").learners
    assert back == (Learner(Member("X", "X0"), 1, 0),), "one that is there again stays"


@pytest.mark.parametrize(("old", "room"), [("A", 1), ("AB", 1), ("ABC", 1), ("ABCDE", 2), ("ABCDEFG", 3)])
def test_newcomers_are_a_minority_of_each_round(old: str, room: int) -> None:
    """F7 (ii), S1: five members never become 63 in one round; a lone one still admits."""
    assert room_for_newcomers(len(old)) == room
    after = Scene(head_of(old)).after(old + "TUVXYZ", joins="TUVXYZ")
    assert len(after.learners) == room and after.members == members(old)
    ready = tuple(Learner(member, 1) for member in members("TUVXYZ"))
    after = Scene(head_of(old, learners=ready)).after(old + "TUVXYZ")
    assert len(after.members) == len(old) + room


def test_a_group_never_grows_beyond_max_peers() -> None:
    after = Scene(head_of("ABCDE"), max_peers=6, min_peers=1).after("ABCDEXY", joins="XY")
    assert len(after.members) + len(after.learners) == 6


def test_a_member_is_dropped_after_two_absences_under_two_leaders() -> None:
    """F7 (iv): one leader alone cannot put an honest member out, however often it leads."""
    head = head_of("ABC")
    once = Scene(head).after("AB", leader="A")
    assert once.members == members("ABC") and once.absent == (Absence(Member("C", "C0"), 1, Member("A", "A0")),)
    once = msgspec.structs.replace(once, state_hash=bytes(32))
    assert Scene(once).after("AB", leader="A").members == members("ABC")
    assert Scene(once).after("AB", leader="B").members == members("AB")
    assert Scene(once).after("ABC", leader="B").absent == ()


def test_one_invite_has_one_vote() -> None:
    """F8: whatever keys come with it."""
    scene, invite = Scene(head_of("ABCDE")), Sponsor("invite", 1)
    requests = {name: scene.join(Member(name, f"{name}0"), credential=b"invite") for name in "XY"}
    opened = scene.roster("ABCDEXY", asked=tuple(requests.values()))
    assert [learner.member.peer for learner in opened.next.learners] == ["X"]
    assert opened.next.sponsored == (Sponsorship(invite, "X"),)
    held = head_of("ABCDE", sponsored=(Sponsorship(invite, "A"),))
    scene = Scene(held)
    requests = {"X": scene.join(Member("X", "X0"), credential=b"invite")}
    assert scene.roster("ABCDEX", asked=tuple(requests.values())).next.learners == ()


def test_a_roster_with_a_request_that_no_credential_admits_is_refused() -> None:
    """F7, F8: the gate is at the connection, but a leader may have made up peers that never connect to others."""
    scene = Scene(head_of("ABCDE"))
    with pytest.raises(ProtocolViolation, match="does not admit"):
        scene.roster("ABCDEX", asked=(scene.join(Member("X", "X0"), credential=b"forged"),))


def test_sponsors_bring_in_so_many_and_no_more() -> None:
    """A member that invites counts below the invite that it came with."""
    top, nested = Sponsor("invite", 3), Sponsor("B", 1)
    sponsors = Sponsors([Sponsorship(top, "A"), Sponsorship(top, "B"), Sponsorship(nested, "C"), Sponsorship(top, "C")])
    assert sponsors.bring_in("C", [nested, top], "ABC"), "it is here already"
    assert not sponsors.bring_in("D", [top], "ABC")
    assert sponsors.bring_in("D", [top], "AC"), "B has left"
    assert not sponsors.bring_in("D", [top, nested], "AC")
    assert sponsors.among("AC") == (Sponsorship(nested, "C"), Sponsorship(top, "A"), Sponsorship(top, "C"))


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    """A peer has one vote: after two merged contributions the restarted one replaces the one that lost its disk."""
    reborn = Member("A", "A1")
    head = head_of("ABC", learners=(Learner(reborn, 2),))
    after = Scene(head).after("BC", leader="B")
    assert reborn in after.members and Member("A", "A0") not in after.members and len(after.members) == 3


def test_owners_follow_from_the_head_and_shares_are_equal() -> None:
    """F9: a leader gives itself nothing; no member has more than its share, and none can choose its slices."""
    contributors = members("ABCDE")
    for name in (bytes([i]) * 32 for i in range(20)):
        owners = owners_of(name, contributors, 13)
        assert max(Counter(owners).values()) <= 3 and set(owners) == set(contributors)
    firsts = {owners_of(bytes([i]) * 32, contributors, 13)[0] for i in range(50)}
    assert firsts == set(contributors)


@pytest.mark.parametrize(
    ("exhausted", "working", "merges"),
    [("ABC", "", True), ("AB", "", True), ("A", "", False), ("", "", False), ("AB", "C", True)],
)
def test_a_round_with_nothing_merged_needs_the_word_of_most(exhausted: str, working: str, merges: bool) -> None:
    """It was each voter's own view: what an exhausted leader had voted for itself was proposed again by all
    that followed, and refused by those that were not exhausted, for ever."""
    scene = Scene(head_of("ABC"))
    plan = WORK.plan(scene.head, 0, dict.fromkeys(members("ABC"), Measurements()), ())
    bodies = [
        msgspec.structs.replace(
            contribution_body(member, plan),
            exhausted=member.peer in exhausted,
            **({} if member.peer in working else {"steps": 0, "samples": 0, "hashes": (), "sqnorms": ()}),
        )
        for member in members("ABC")
    ]
    settled = WORK.settle(scene.head, plan, bodies)
    assert (settled is not None) == merges
    assert settled is None or any(settled.weights) == bool(working)
    idle = [body for body in bodies if not body.steps]
    assert WORK.settle(scene.head, plan, idle[:2]) is None, "the third may have samples"


def test_issued_samples_are_merged_or_free() -> None:
    """What is planned and not merged returns; nothing is counted twice."""
    scene = Scene(head_of("ABC"))
    ledger = scene.after("ABC").ledger
    assert ledger.cursor == 24 and ledger.returned == ()
    plan = WORK.plan(scene.head, 0, dict.fromkeys(members("ABC"), Measurements()), ())
    bodies = [contribution_body(member, plan) for member in members("AB")]
    settled = WORK.settle(scene.head, plan, bodies)
    assert settled is not None
    merged = sum(body.samples for body in bodies)
    assert settled.ledger.cursor == merged + count(settled.ledger.returned)


def test_a_roster_of_no_member_or_nothing_is_no_value() -> None:
    scene = Scene(head_of("ABC", learners=(Learner(Member("X", "X0"), 1),)))
    with pytest.raises(ProtocolViolation, match="no contribution of a member"):
        scene.roster("X")
    with pytest.raises(ProtocolViolation, match="out of order"):
        scene.roster("AB", turned=True)


def test_quorums() -> None:
    def enough(mode: Mode, names: str, votes: str) -> bool:
        electorate = Electorate(mode)
        witness = "W" if mode == "required" or len(names) % 2 == 0 else None
        return electorate.is_quorum(names, witness, set(votes))

    assert enough("witness", "AB", "AW") and not enough("witness", "AB", "A") and not enough("witness", "ABC", "AW")
    assert enough("witness", "ABCD", "ABW") and not enough("witness", "ABCD", "AB")
    assert enough("required", "ABC", "ABW") and not enough("required", "ABC", "ABC")
    assert not enough("required", "AB", "AW") and not enough("required", "", "W")


def test_the_witness_votes_last() -> None:
    """It completes a certificate, and never stands in for a vote that brings weights before that."""
    electorate, head = Electorate("witness"), head_of("ABCD")
    a, b, c, _ = members("ABCD")
    witness = Member("W", "W0")
    assert not electorate.completes(head, {a}) and electorate.completes(head, {a, b})
    assert not electorate.completes(head, {a, b, c}) and electorate.completes(head, {a, b, witness})
    assert not electorate.completes(head_of("ABC"), {a})


def test_newcomers_that_do_not_come_cost_no_time() -> None:
    """F14: a group with no-shows commits as many rounds as one without."""
    quiet = GroupOfNodes("ABC")
    quiet.run(30.0)
    busy = GroupOfNodes("ABC")
    busy.run_to(1)
    for name in "XYZ":
        busy.start(name)
    busy.lost = lambda source, target, message: (
        source in "XYZ" and not isinstance(message, msg.JoinMessage | msg.StatusMessage | msg.AskChainMessage)
    )
    busy.run(30.0 - busy.now)
    busy.check()
    assert busy.round("A") >= 0.6 * quiet.round("A")
    assert busy.head("A").members == quiet.head("A").members


def contribution_bytes() -> int:
    """Return what one contribution of these groups takes of a roster."""
    scene = Scene(head_of("A"))
    plan = WORK.plan(scene.head, 0, {Member("A", "A0"): Measurements()}, ())
    return bytes_of(scene.group.sign("A", "contribution", contribution_body(Member("A", "A0"), plan)))


ROOM_FOR_THREE = 3 * contribution_bytes() + contribution_bytes() // 2


def test_a_full_roster_takes_all_members_in_turn_and_none_leaves() -> None:
    group = GroupOfNodes("ABCDE", roster_bytes=ROOM_FOR_THREE)
    group.run_to(1)
    begun = group.round("A")
    group.run_to(begun + 12)
    heads = [head for head in group.machines["A"].committed if head.round > begun]
    assert all(len(head.members) == 5 and not head.absent for head in heads)
    told = {
        (fields["round"], peer)
        for fields in (emit.fields for emit in group.machines["B"].told if emit.event == "roster_full")
        for peer in fields["peers"]  # type: ignore[union-attr]
    }
    for first in range(begun + 1, begun + 9):
        left_out = [{peer for round, peer in told if round == number} for number in range(first, first + 4)]
        assert all(len(peers) == 2 for peers in left_out), "each round tells of the two that have no room"
        assert not set.intersection(*left_out), "all contribute within four rounds"


def test_a_dead_member_of_a_group_with_full_rosters_leaves() -> None:
    """Nothing tells a member that is dead from one that has no room, but for the rounds of its own turn."""
    group = GroupOfNodes("ABCDE", roster_bytes=ROOM_FOR_THREE)
    group.run_to(1)
    group.crash("E")
    group.run(120.0, until=lambda: len(group.head("A").members) == 4)
    assert {member.peer for member in group.head("A").members} == set("ABCD")
    group.run_to(group.round("A") + 8, peers="ABCD")
    assert {member.peer for member in group.head("A").members} == set("ABCD")


def test_a_leader_cannot_call_a_roster_full_that_is_not() -> None:
    """Only those are not counted as absent that the draw puts behind all of a roster without room for one more."""
    head = head_of("ABCDE")
    drawn = "".join(sorted("ABCDE", key=lambda name: RosterRoom(head, head.hash, 4)._drawn(Member(name, f"{name}0"))))
    first, last = "".join(sorted(drawn[:3])), "".join(sorted(drawn[2:]))

    def absent(present: str, room: int) -> set[str]:
        after = Scene(head, roster_bytes=room).after(present)
        assert len(after.members) == 5
        return {absence.member.peer for absence in after.absent}

    assert absent(first, ROOM_FOR_THREE) == set()
    assert absent(last, ROOM_FOR_THREE) == set(drawn[:2]), "it was their turn, so they have sent nothing"
    assert absent(first, 10 * ROOM_FOR_THREE) == set(drawn[3:]), "there was room for them"
    waiting = tuple(Absence(member, 1, Member("Z", "Z0")) for member in members("ABCDE"))
    opened = Scene(msgspec.structs.replace(head, absent=waiting), roster_bytes=ROOM_FOR_THREE).roster("ABC")
    kept = {absence.member: absence.rounds for absence in opened.next.absent}
    assert {member for member, rounds in kept.items() if rounds == 1} == set(opened.left_out), "as it was before"


def test_a_newcomer_is_told_once_that_the_group_has_no_place() -> None:
    group = GroupOfNodes("ABC", max_peers=3)
    group.run_to(1)
    newcomer = group.start("D")
    group.run(10.0)
    assert [emit.fields["most"] for emit in newcomer.told if emit.event == "group_full"] == [3]
    assert not any(emit.event == "group_full" for peer in "ABC" for emit in group.machines[peer].told)
