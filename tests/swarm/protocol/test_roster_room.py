"""What one roster holds, and which contributions go into one that does not hold all."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from peer.bounds import NUMBERS_END
from peer.identity import Identity, Signed, sign_body
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.plan import Contribution
from swarm.protocol.receipts import RECEIPT_KIND, ReceiptBody
from swarm.protocol.roster_room import (
    ENVELOPE_BYTES,
    ROSTER_BYTES_MAX,
    USUAL_RANGES,
    USUAL_RECEIPTS,
    RosterRoom,
    bytes_of,
    peers_that_fit,
    usual_bytes,
)
from tests.swarm.support.group import regrouped

SLICES = 3
KEYS = [Identity.generate() for _ in range(2)]
MEMBERS = tuple(Member(f"{index:052}", "f" * 16) for index in range(40))
HEAD = regrouped(genesis("run", b"s" * 32), MEMBERS, 1)
EACH = 300 + ENVELOPE_BYTES


def sized(total: int) -> Signed:
    """Return something as long as a signed contribution of so many bytes."""
    return Signed(bytes(total - ENVELOPE_BYTES), "", b"")


def room_of(head: Head, most: int = 10 * EACH, slices: int = 0) -> RosterRoom:
    return RosterRoom(head, head.hash, slices, most)


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("slices", [0, 1, 15, 16, 300])
def test_the_usual_length_is_that_of_a_contribution_with_the_longest_numbers(slices: int, pipeline: bool) -> None:
    each = (NUMBERS_END, NUMBERS_END)
    receipt = ReceiptBody(bytes(32), KEYS[1].peer_id, (each,) * (USUAL_RANGES // USUAL_RECEIPTS))
    body = Contribution(
        head=bytes(32),
        plan=bytes(32),
        member=Member(KEYS[0].peer_id, "f" * 16),
        steps=NUMBERS_END,
        samples=NUMBERS_END,
        loss=1.5,
        hashes=(bytes(32),) * slices,
        sqnorms=(1.5,) * slices,
        counted=(each,) * USUAL_RANGES if pipeline else (),
        receipts=(sign_body(KEYS[1], RECEIPT_KIND, receipt),) * USUAL_RECEIPTS if pipeline else (),
        exhausted=True,
    )
    whole = len(msgspec.msgpack.encode(sign_body(KEYS[0], "contribution", body)))
    assert whole <= usual_bytes(slices, pipeline) <= whole + 16
    assert peers_that_fit(slices, pipeline) * whole <= ROSTER_BYTES_MAX < LARGE_HEADER_BYTES * 0.9


def test_a_roster_with_room_for_all_takes_all() -> None:
    found = {member: sized(EACH) for member in MEMBERS[:10]}
    assert room_of(HEAD).fit(found) == list(MEMBERS[:10])


def test_a_full_roster_has_others_in_each_round() -> None:
    taken: Counter[Member] = Counter()
    found = {member: sized(EACH) for member in MEMBERS}
    for number in range(60):
        head = msgspec.structs.replace(HEAD, round=number)
        chosen = room_of(head).fit(found)
        assert len(chosen) == 10 and chosen == sorted(chosen)
        others = [member for member in MEMBERS if member not in chosen]
        left_out = room_of(head).left_out({member: found[member] for member in chosen}, others)
        assert list(left_out) == others, "each voter finds the same"
        taken.update(chosen)
    assert len(taken) == len(MEMBERS) and min(taken.values()) >= 4 and max(taken.values()) <= 30


def test_long_contributions_come_last_and_the_shortest_of_them_first() -> None:
    most = 100 * EACH
    sizes = [EACH] * 20 + [90 * EACH, 30 * EACH, 60 * EACH]
    found = {member: sized(size) for member, size in zip(MEMBERS, sizes, strict=False)}
    for number in range(20):
        head = msgspec.structs.replace(HEAD, round=number)
        assert room_of(head, most).fit(found) == [*MEMBERS[:20], MEMBERS[21]]
        assert not room_of(head, most).left_out({m: found[m] for m in MEMBERS[:20]}, [MEMBERS[20]])


def test_newcomers_come_after_members_and_never_alone() -> None:
    strangers = [Member(f"x{index:051}", "f" * 16) for index in range(12)]
    found = {member: sized(EACH) for member in (*MEMBERS[:4], *strangers)}
    chosen = room_of(HEAD).fit(found)
    assert chosen[:4] == list(MEMBERS[:4]) and len(chosen) == 10
    alone = {MEMBERS[0]: sized(9 * EACH), MEMBERS[1]: sized(8 * EACH), **{m: sized(EACH) for m in strangers}}
    assert MEMBERS[1] in room_of(HEAD).fit(alone), "the shortest contribution of a member"


def test_bytes_of_counts_the_envelope() -> None:
    assert bytes_of(sized(EACH)) == EACH
