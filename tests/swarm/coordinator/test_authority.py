"""The authority never takes a run back: not for a stranger, not after its own restart."""

from __future__ import annotations

import msgspec
import pytest
import trio

from peer.errors import RemoteError
from peer.events import EventLog
from peer.identity import Identity, sign_body
from peer.net.host import Host, HostConfig, open_host
from swarm.coordinator.authority import Authority
from swarm.coordinator.durable_state import DurableState
from swarm.coordinator.handlers import CoordinatorHandlers
from swarm.coordinator.rules import GroupRules, RegroupTimeouts
from swarm.coordinator.run_progress import RunProgress
from swarm.protocol import messages as say
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import REGROUP_KIND
from swarm.protocol.quorum import ASKED_MAX, ask_head_reports, open_regroup
from tests.swarm.coordinator.regroup_scene import (
    FIRST,
    MAX_PEERS,
    NEVER_S,
    after,
    begun,
    first_of,
    regrouped_by,
    some_members,
)

PATIENT = RegroupTimeouts(poll_s=0.1, gone_s=1000.0)


async def test_only_a_former_member_takes_a_run_back() -> None:
    me, peer = Identity.generate(), Identity.generate()
    gone = (Member("gone1", "s"), Member("gone2", "s"))
    start, signed = begun(me, gone)
    later = msgspec.structs.replace(start, round=7, previous=start.hash)
    newcomer = say.HeadReport(start, Member(peer.peer_id, "fresh"), "joining", regroup=signed)

    assert await regrouped_by(after(later, signed), newcomer, me, peer, within_s=NEVER_S) is None

    restarted = msgspec.structs.replace(later, members=(*gone, Member(peer.peer_id, "before")))
    back = await regrouped_by(after(restarted, signed), newcomer, me, peer)
    assert back is not None and (back.term, back.round, back.members) == (2, 0, (newcomer.member,))

    same_round = say.HeadReport(later, Member(peer.peer_id, "fresh"), "joining", regroup=signed)
    on = await regrouped_by(after(later, signed), same_round, me, peer)
    assert on is not None and (on.term, on.round) == (2, 7)

    over = await regrouped_by(after(restarted, signed), newcomer, me, peer, rounds=7, within_s=NEVER_S)
    assert over is None, "a complete run is not regrouped"
    for round, expected in ((6, 2), (7, None)):
        rest = msgspec.structs.replace(first_of("rest"), round=round)
        on = await regrouped_by(
            after(restarted, signed), newcomer, me, peer, rounds=7, others=(rest,), within_s=60 if expected else NEVER_S
        )
        assert (on.term if on is not None else None) == expected, "a run is complete once all of its groups are"


async def test_a_run_goes_back_when_the_only_holder_of_its_last_commit_is_lost() -> None:
    """One peer was regrouped alone, committed once more and died. A former member is at the regrouped head."""
    me, peer = Identity.generate(), Identity.generate()
    both, _ = begun(me, (Member("gone", "s"), Member(peer.peer_id, "s")))
    alone = both.regrouped((Member("gone", "s"),), 2)
    signed = sign_body(me, REGROUP_KIND, alone)
    lost = msgspec.structs.replace(alone, round=1, previous=alone.hash)
    survivor = say.HeadReport(alone, Member(peer.peer_id, "s"), "joining", regroup=signed)

    back = await regrouped_by(after(lost, signed), survivor, me, peer, (both, alone))
    assert back is not None and (back.term, back.round, back.members) == (3, 0, (survivor.member,))

    stranger = Identity.generate()
    claim = say.HeadReport(alone, Member(stranger.peer_id, "s"), "joining", regroup=signed)
    assert await regrouped_by(after(lost, signed), claim, me, stranger, (both, alone), within_s=NEVER_S) is None
    assert await regrouped_by(after(lost, signed), survivor, me, peer, within_s=NEVER_S) is None, "from long ago"


async def test_strangers_crowd_out_no_member() -> None:
    """However many peers claim to take part, members are asked, and regrouped with former members."""
    me, peer = Identity.generate(), Identity.generate()
    lately, *strangers = some_members(5 * ASKED_MAX)
    start, signed = begun(me, (Member("gone", "s"), Member(peer.peer_id, "s")))
    before = msgspec.structs.replace(start, members=(*start.members, lately))
    left = say.HeadReport(start, Member(peer.peer_id, "s"), "training", regroup=signed)
    on = await regrouped_by(after(start, signed), left, me, peer, (before,), crowd=(lately, *strangers))
    assert on is not None and len(on.members) == MAX_PEERS
    assert {left.member, lately} < set(on.members)

    on = await regrouped_by(after(start, signed), left, me, peer, (before,), crowd=(lately, *strangers), per_prefix=1)
    assert on is not None and set(on.members) == {left.member, lately}, "one of the crowd's address prefix"


async def test_all_members_of_a_large_group_are_asked() -> None:
    me = Identity.generate()
    start, signed = begun(me, tuple(some_members(2 * ASKED_MAX)))
    crowd = [member.peer for member in some_members(5 * ASKED_MAX)]
    async with (
        open_host(HostConfig(identity=me, events=EventLog())) as host,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as last,
    ):
        members = [member.peer for member in start.members]
        authority = Authority(host, GroupRules(genesis=FIRST), after(start, signed), lambda: crowd)
        asked = authority._peers_to_ask()
        assert asked[: len(members)] == members and set(asked) == {*members, *crowd}

        CoordinatorHandlers(last, [Authority(last, GroupRules(genesis=FIRST), DurableState(), list)])
        await host.connect_address(last.addresses[0], timeout_s=30)
        for most, answers in ((len(members), 0), (len(members) + 1, 1)):
            asking = [*members, last.peer_id]
            head_reports = await ask_head_reports(host.rpc, asking, timeout_s=60, group="run", most=most)
            assert len(head_reports) == answers


async def test_peers_ask_which_heads_the_authority_believes() -> None:
    me = Identity.generate()
    start, signed = begun(me, (Member("gone", "s"),))
    kept = msgspec.structs.replace(start, round=5)
    last = msgspec.structs.replace(start, round=7)
    later = msgspec.structs.replace(start, round=8)
    never = msgspec.structs.replace(kept, state_hash=b"x" * 32)
    async with (
        open_host(HostConfig(identity=me, events=EventLog())) as host,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as other,
    ):
        durable = after(last, signed)
        durable.see(kept, 60.0)
        durable.see(last, 60.0)
        CoordinatorHandlers(host, [Authority(host, GroupRules(genesis=FIRST, stage=1), durable, list)])
        await other.connect_address(host.addresses[0], timeout_s=30)
        asked = say.AskBelieved("run", tuple((head.hash, head.round) for head in (start, kept, never, last, later)))
        answer = (await other.rpc.call(host.peer_id, say.BELIEVED, asked, timeout_s=30)).body
        assert answer.heads == (kept.hash, last.hash) and answer.last == last.position


async def test_each_group_begins_once_the_run_has_enough_peers() -> None:
    """Two peers are enough, whichever groups they are in. A group without a peer waits for its first."""
    async with (
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as one,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as two,
        trio.open_nursery() as nursery,
    ):
        progress, timeouts = RunProgress(), RegroupTimeouts(join_request_s=600.0)
        authorities = [
            Authority(host, GroupRules(genesis=first_of(group), min_peers=2), DurableState(), list, progress, timeouts)
            for group in ("g0", "g1", "g2")
        ]
        CoordinatorHandlers(host, authorities)
        for authority in authorities:
            nursery.start_soon(authority.run)
        for peer in (one, two):
            await peer.connect_address(host.addresses[0], timeout_s=30)

        async def request_join(peer: Host, group: str) -> say.HeadReport:
            first = first_of(group)
            body = say.JoinRequest(first.hash, 0, Member(peer.peer_id, "s"), peer.addresses, group)
            return (await peer.rpc.call(host.peer_id, say.REQUEST_JOIN, body, timeout_s=30)).body

        async def begun(peer: Host, group: str) -> Head:
            with trio.fail_after(60):
                while not (report := await request_join(peer, group)).head.members:
                    await trio.sleep(0.05)
            assert report.regroup is not None
            assert open_regroup(report.regroup, host.peer_id, group) == report.head
            return report.head

        assert not (await request_join(one, "g0")).head.members
        await trio.sleep(2 * timeouts.poll_s)
        assert not (await request_join(one, "g0")).head.members, "one peer of two"
        await request_join(two, "g2")
        heads = [await begun(one, "g0"), await begun(two, "g2")]
        assert [[m.peer for m in head.members] for head in heads] == [[one.peer_id], [two.peer_id]]
        assert not authorities[1].begun
        assert [m.peer for m in (await begun(two, "g1")).members] == [two.peer_id], "one peer is enough now"

        with pytest.raises(RemoteError, match="no such group") as refused:
            await request_join(one, "g7")
        assert refused.value.code == "RoundError", "no penalty"
        with pytest.raises(RemoteError, match="no such group"):
            await one.rpc.call(host.peer_id, say.HEAD_REPORT, say.AskHead(), timeout_s=30)  # which of three?
        asked = await ask_head_reports(one.rpc, [host.peer_id], timeout_s=60, group="g2")
        assert [report.head.run_id for _, report in asked] == ["g2"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("phase", [say.NO_MAJORITY, "training"])
async def test_of_two_members_the_survivor_continues_soon_if_it_misses_the_other(phase: str) -> None:
    """One of two members cannot continue alone. While the survivor does not miss it, perhaps only the authority cannot
    reach it."""
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member(peer.peer_id, "s"), Member("dead", "s")))
    left = say.HeadReport(start, Member(peer.peer_id, "s"), phase, regroup=signed)
    within_s = 60.0 if phase == say.NO_MAJORITY else NEVER_S
    alone = await regrouped_by(after(start, signed), left, me, peer, timeouts=PATIENT, within_s=within_s)
    assert (alone is not None and alone.members == (left.member,)) if phase == say.NO_MAJORITY else alone is None


async def test_a_majority_that_closed_its_connections_is_waited_for() -> None:
    """Three of four could continue without the fourth."""
    me, peer = Identity.generate(), Identity.generate()
    dead = tuple(Member(f"dead{letter}", "s") for letter in "abc")
    start, signed = begun(me, (Member(peer.peer_id, "s"), *dead))
    left = say.HeadReport(start, Member(peer.peer_id, "s"), say.NO_MAJORITY, regroup=signed)
    assert await regrouped_by(after(start, signed), left, me, peer, timeouts=PATIENT, within_s=NEVER_S) is None
