"""The authority never takes a run back: not for a stranger, not after its own restart."""

from __future__ import annotations

import msgspec
import trio

from peer.events import EventLog
from peer.host import HostConfig, open_host
from peer.identity import Identity, Signed, sign_body
from swarm import authority as module
from swarm import messages as say
from swarm.authority import Authority, Memory
from swarm.authority_desk import AuthorityDesk
from swarm.chain import Head, Member, genesis
from swarm.follow import open_regroup
from swarm.messages import REGROUP_KIND

FIRST = genesis("run", b"0" * 32)


async def regrouped_by(
    memory: Memory, standing: say.Standing, me: Identity, stranger: Identity, seen_before: tuple[Head, ...] = ()
) -> Head | None:
    """What an authority with that memory, which has just seen those heads before the last, signs anew when one peer,
    standing there, knocks and nobody else is alive."""
    before = memory.signed
    async with (
        open_host(HostConfig(identity=me, events=EventLog())) as host,
        open_host(HostConfig(identity=stranger, events=EventLog())) as other,
        trio.open_nursery() as nursery,
    ):
        authority = Authority(host, FIRST, 1, lambda: [stranger.peer_id], memory)
        for head in (*seen_before, authority.head):
            authority._see(head)
        AuthorityDesk(host, [authority])
        told = trio.Event()

        async def answer(call: object) -> say.Standing:
            return standing

        async def regroup(call: object) -> say.Standing:
            told.set()
            return standing

        other.rpc.serve(say.STANDING, answer)  # type: ignore[arg-type]
        other.rpc.serve(say.REGROUP, regroup)  # type: ignore[arg-type]
        await host.connect_address(other.addresses[0], timeout_s=10)
        nursery.start_soon(authority.run)
        with trio.move_on_after(4):
            await told.wait()
        nursery.cancel_scope.cancel()
    signed = memory.signed
    return None if signed is None or signed == before else open_regroup(signed, me.peer_id, "run")


def begun(me: Identity, members: tuple[Member, ...]) -> tuple[Head, Signed]:
    head = FIRST.regrouped(members, 1)
    return head, sign_body(me, REGROUP_KIND, head)


async def test_only_who_was_a_member_takes_a_run_back(monkeypatch: object) -> None:
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    gone = (Member("gone1", "s"), Member("gone2", "s"))
    start, signed = begun(me, gone)
    later = msgspec.structs.replace(start, round=7, previous=start.hash)
    newcomer = say.Standing(start, Member(peer.peer_id, "fresh"), "knocking", signed)

    assert await regrouped_by(Memory(signed, seen=later), newcomer, me, peer) is None

    restarted = msgspec.structs.replace(later, members=(*gone, Member(peer.peer_id, "before")))
    back = await regrouped_by(Memory(signed, seen=restarted), newcomer, me, peer)
    assert back is not None and (back.term, back.round, back.members) == (2, 0, (newcomer.member,))

    same_round = say.Standing(later, Member(peer.peer_id, "fresh"), "knocking", signed)
    on = await regrouped_by(Memory(signed, seen=later), same_round, me, peer)
    assert on is not None and (on.term, on.round) == (2, 7)


async def test_a_commit_lost_with_its_only_holder_is_gone_back_from(monkeypatch: object) -> None:
    """It was regrouped alone, committed once more and died; another member of before stands at the regroup."""
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    both, _ = begun(me, (Member("gone", "s"), Member(peer.peer_id, "s")))
    alone = both.regrouped((Member("gone", "s"),), 2)
    signed = sign_body(me, REGROUP_KIND, alone)
    lost = msgspec.structs.replace(alone, round=1, previous=alone.hash)
    survivor = say.Standing(alone, Member(peer.peer_id, "s"), "knocking", signed)

    back = await regrouped_by(Memory(signed, seen=lost), survivor, me, peer, (both, alone))
    assert back is not None and (back.term, back.round, back.members) == (3, 0, (survivor.member,))

    stranger = Identity.generate()
    claim = say.Standing(alone, Member(stranger.peer_id, "s"), "knocking", signed)
    assert await regrouped_by(Memory(signed, seen=lost), claim, me, stranger, (both, alone)) is None
    assert await regrouped_by(Memory(signed, seen=lost), survivor, me, peer) is None, "not from long ago either"
