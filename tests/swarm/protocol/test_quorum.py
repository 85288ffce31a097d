"""Which heads count, by the reports of peers of which none is believed alone."""

from __future__ import annotations

import msgspec

from peer.identity import Identity, Signed, sign_body
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.messages import REGROUP_KIND, HeadReport
from swarm.protocol.quorum import rank_heads

AUTHORITY = Identity.generate()
PEERS = [Identity.generate().peer_id for _ in range(5)]
MEMBERS = tuple(sorted(Member(peer, "s") for peer in PEERS[:4]))
START = genesis("run", b"s0" * 16)
BEGUN = START.regrouped(MEMBERS, 1)
SIGNED = sign_body(AUTHORITY, REGROUP_KIND, BEGUN)


def after(head: Head, members: tuple[Member, ...] = MEMBERS, state: bytes = b"s1" * 16) -> Head:
    return msgspec.structs.replace(head, round=head.round + 1, previous=head.hash, members=members, state_hash=state)


def at(head: Head, *members: Member, signed: Signed | None = SIGNED) -> list[tuple[str, HeadReport]]:
    return [(member.peer, HeadReport(head, member, "training", regroup=signed)) for member in members]


def heads(head_reports: list[tuple[str, HeadReport]]) -> list[Head]:
    return [candidate.head for candidate in rank_heads(head_reports, AUTHORITY.peer_id, START)]


def test_a_majority_of_its_own_members_makes_a_head_count() -> None:
    first = after(BEGUN)
    assert heads(at(first, *MEMBERS[:3])) == [first]
    assert heads(at(first, *MEMBERS[:2])) == []


def test_members_at_the_next_head_still_back_the_previous_one() -> None:
    first = after(BEGUN)
    second = after(first, state=b"s2" * 16)
    split = at(first, *MEMBERS[:2]) + at(second, *MEMBERS[2:])
    [candidate] = rank_heads(split, AUTHORITY.peer_id, START)
    assert candidate.head == first, "half of the members are not enough for the second"
    assert set(candidate.holders) == {member.peer for member in MEMBERS}, (
        "a member at the next head still holds the state"
    )
    assert heads(at(first, MEMBERS[0]) + at(second, *MEMBERS[1:]))[0] == second


def test_non_members_and_restarted_members_back_nothing() -> None:
    first = after(BEGUN)
    restarted = tuple(Member(member.peer, "another session") for member in MEMBERS)
    assert heads(at(first, *restarted)) == []
    follower = after(first, (Member(PEERS[4], "s"),), b"lie!" * 8)
    assert first not in heads(at(first, *MEMBERS[:2]) + at(follower, Member(PEERS[4], "s")))


def test_a_term_needs_the_authority() -> None:
    first = after(BEGUN)
    forged = sign_body(Identity.generate(), REGROUP_KIND, BEGUN)
    assert heads(at(first, *MEMBERS, signed=forged)) == heads(at(first, *MEMBERS, signed=None)) == []
    assert heads(at(BEGUN, Member(PEERS[4], "s"))) == [BEGUN], "a signed head counts without other reports"
