"""A stage that lost its replicas continues from a commit that the authority knows, and from no other."""

from __future__ import annotations

from pathlib import Path

import msgspec

from peer.identity import Identity
from swarm.coordinator.durable_state import FileState
from swarm.coordinator.history import STAGE_HISTORY_S
from swarm.coordinator.rules import RegroupTimeouts
from swarm.protocol import messages as say
from swarm.protocol.head import Member
from swarm.run.home import Home
from tests.swarm.coordinator.regroup_scene import NEVER_S, after, begun, first_of, regrouped_by


async def test_a_stage_without_replicas_continues_from_a_kept_commit() -> None:
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    kept = msgspec.structs.replace(start, round=5, previous=start.hash, inner_step=50)
    last = msgspec.structs.replace(start, round=7, previous=b"6" * 32, inner_step=70)
    forged = msgspec.structs.replace(kept, state_hash=b"x" * 32)
    beside = msgspec.structs.replace(first_of("beside"), round=8, inner_step=80)
    for head, seen, expected in ((kept, (kept,), 8), (forged, (kept,), None), (kept, (), None)):
        report = say.HeadReport(head, Member(peer.peer_id, "replacement"), "joining", regroup=signed)
        within_s = NEVER_S if expected is None else 60.0
        on = await regrouped_by(
            after(last, signed), report, me, peer, seen, stage=1, others=(beside,), within_s=within_s
        )
        assert (on.round if on is not None else None) == expected
        if on is not None:
            assert (on.term, on.inner_step, on.state_hash) == (2, 80, kept.state_hash)
            assert on.previous == kept.hash and on.members == (report.member,)


async def test_an_invented_head_is_not_followed() -> None:
    """The stage has no replica left. A stranger reports a head of its own, whose only member it is."""
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    last = msgspec.structs.replace(start, round=7, previous=b"6" * 32)
    beside = msgspec.structs.replace(first_of("beside"), round=8)
    stranger = Member(peer.peer_id, "s")
    for round in (2**50, 8, 7):
        forged = msgspec.structs.replace(last, round=round, state_hash=b"x" * 32, members=(stranger,))
        durable = after(last, signed)
        report = say.HeadReport(forged, stranger, "training", regroup=signed)
        on = await regrouped_by(durable, report, me, peer, stage=1, others=(beside,), within_s=NEVER_S)
        assert on is None and durable.seen is not None and durable.seen.head == last


async def test_strangers_are_followed_where_no_known_peer_comes_back() -> None:
    """All peers were replaced while the authority was away."""
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    stranger = Member(peer.peer_id, "s")
    theirs = msgspec.structs.replace(start, round=40, previous=b"6" * 32, members=(stranger,))
    durable = after(msgspec.structs.replace(start, round=7, previous=b"5" * 32), signed)
    report = say.HeadReport(theirs, stranger, "training", regroup=signed)

    def believed() -> bool:
        return durable.seen is not None and durable.seen.head == theirs

    timeouts = RegroupTimeouts(poll_s=0.1, strangers_s=0.5)
    await regrouped_by(durable, report, me, peer, stage=1, timeouts=timeouts, until=believed)
    assert believed()


async def test_a_restarted_authority_remembers_what_it_saw(tmp_path: Path) -> None:
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    kept = msgspec.structs.replace(start, round=5, previous=start.hash)
    between = msgspec.structs.replace(start, round=6, previous=kept.hash)
    last = msgspec.structs.replace(start, round=7, previous=between.hash)
    durable = FileState(Home(tmp_path))
    durable.keep(signed)
    for head in (start, kept, between, last):
        durable.see(head, STAGE_HISTORY_S)
    del durable

    report = say.HeadReport(kept, Member(peer.peer_id, "replacement"), "joining", regroup=signed)
    restarted = FileState(Home(tmp_path))
    on = await regrouped_by(restarted, report, me, peer, stage=1)
    assert on is not None and (on.term, on.round, on.previous) == (2, 5, kept.hash)
    again = FileState(Home(tmp_path))
    assert again.signed == restarted.signed and again.seen == restarted.seen
