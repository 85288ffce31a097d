"""The authority never takes a run back: not for a stranger, not after its own restart. Each group has its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from peer.errors import RemoteError
from peer.events import EventLog
from peer.identity import Identity, Signed, sign_body
from peer.net.host import Host, HostConfig, open_host
from swarm.coordinator import authority as module
from swarm.coordinator.authority import STAGE_BACK_S_MAX, Authority
from swarm.coordinator.durable_state import DurableState, FileState, SeenHead
from swarm.coordinator.handlers import CoordinatorHandlers
from swarm.protocol import messages as say
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.messages import REGROUP_KIND
from swarm.protocol.quorum import ASKED_MAX, ask_head_reports, open_regroup
from swarm.run.home import Home

FIRST = genesis("run", b"0" * 32)
MAX_PEERS = 3
NEVER_S = 2.0  # many times as long as it takes where it does sign


async def regrouped_by(
    durable: DurableState,
    report: say.HeadReport,
    me: Identity,
    stranger: Identity,
    seen_before: tuple[Head, ...] = (),
    fast_forward: Callable[[Head], Head] | None = None,
    rounds: int = 0,
    *,
    others: tuple[Head, ...] = (),
    crowd: tuple[Member, ...] = (),
    within_s: float = 60.0,
    until: Callable[[], bool] | None = None,
) -> Head | None:
    """What an authority with that memory, which has just seen those heads before the last, signs anew when one peer,
    standing there, knocks and nobody else is alive. The other groups stand at `others`. The `crowd` publishes records,
    and knocks at that head. Waits for the signing, or `until` that holds."""
    before = durable.signed
    async with (
        open_host(HostConfig(identity=me, events=EventLog())) as host,
        open_host(HostConfig(identity=stranger, events=EventLog())) as other,
        trio.open_nursery() as nursery,
    ):
        elsewhere = [Authority(host, head, 1, list, DurableState(), rounds) for head in others]
        for other_group in elsewhere:
            other_group._note_completion()
        known = [*(member.peer for member in crowd), stranger.peer_id]
        authority = Authority(
            host,
            FIRST,
            1,
            lambda: known,
            durable,
            rounds,
            fast_forward=fast_forward,
            others=lambda: elsewhere,
            max_peers=MAX_PEERS,
        )
        for member in crowd:
            authority.request_join(say.JoinRequest(report.head.hash, report.head.round, member, (), "run"))
        for head in (*seen_before, authority.head):
            authority._see(head)
        CoordinatorHandlers(host, [authority])
        told = trio.Event()

        async def answer(call: object) -> say.HeadReport:
            return report

        async def regroup(call: object) -> say.HeadReport:
            told.set()
            return report

        other.rpc.register(say.HEAD_REPORT, answer)  # type: ignore[arg-type]
        other.rpc.register(say.REGROUP, regroup)  # type: ignore[arg-type]
        await host.connect_address(other.addresses[0], timeout_s=30)
        nursery.start_soon(authority.run)
        with trio.move_on_after(within_s):
            if until is None:
                await told.wait()
            while until is not None and not until():
                await trio.sleep(0.02)
        nursery.cancel_scope.cancel()
    signed = durable.signed
    return None if signed is None or signed == before else open_regroup(signed, me.peer_id, "run")


def begun(me: Identity, members: tuple[Member, ...]) -> tuple[Head, Signed]:
    head = FIRST.regrouped(members, 1)
    return head, sign_body(me, REGROUP_KIND, head)


def after(head: Head, signed: Signed) -> DurableState:
    """What an authority remembers that saw that head last, and knows of none before it."""
    return DurableState(signed, SeenHead(head))


async def test_only_who_was_a_member_takes_a_run_back(monkeypatch: object) -> None:
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    gone = (Member("gone1", "s"), Member("gone2", "s"))
    start, signed = begun(me, gone)
    later = msgspec.structs.replace(start, round=7, previous=start.hash)
    newcomer = say.HeadReport(start, Member(peer.peer_id, "fresh"), "joining", signed)

    assert await regrouped_by(after(later, signed), newcomer, me, peer, within_s=NEVER_S) is None

    restarted = msgspec.structs.replace(later, members=(*gone, Member(peer.peer_id, "before")))
    back = await regrouped_by(after(restarted, signed), newcomer, me, peer)
    assert back is not None and (back.term, back.round, back.members) == (2, 0, (newcomer.member,))

    same_round = say.HeadReport(later, Member(peer.peer_id, "fresh"), "joining", signed)
    on = await regrouped_by(after(later, signed), same_round, me, peer)
    assert on is not None and (on.term, on.round) == (2, 7)

    over = await regrouped_by(after(restarted, signed), newcomer, me, peer, rounds=7, within_s=NEVER_S)
    assert over is None, "a run that is complete goes on from nowhere"
    for round, expected in ((6, 2), (7, None)):
        rest = msgspec.structs.replace(first_of("rest"), round=round)
        on = await regrouped_by(
            after(restarted, signed), newcomer, me, peer, rounds=7, others=(rest,), within_s=60 if expected else NEVER_S
        )
        assert (on.term if on is not None else None) == expected, "until it is complete everywhere"


async def test_a_commit_lost_with_its_only_holder_is_gone_back_from(monkeypatch: object) -> None:
    """It was regrouped alone, committed once more and died; another member of before stands at the regroup."""
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    both, _ = begun(me, (Member("gone", "s"), Member(peer.peer_id, "s")))
    alone = both.regrouped((Member("gone", "s"),), 2)
    signed = sign_body(me, REGROUP_KIND, alone)
    lost = msgspec.structs.replace(alone, round=1, previous=alone.hash)
    survivor = say.HeadReport(alone, Member(peer.peer_id, "s"), "joining", signed)

    back = await regrouped_by(after(lost, signed), survivor, me, peer, (both, alone))
    assert back is not None and (back.term, back.round, back.members) == (3, 0, (survivor.member,))

    stranger = Identity.generate()
    claim = say.HeadReport(alone, Member(stranger.peer_id, "s"), "joining", signed)
    assert await regrouped_by(after(lost, signed), claim, me, stranger, (both, alone), within_s=NEVER_S) is None
    assert await regrouped_by(after(lost, signed), survivor, me, peer, within_s=NEVER_S) is None, "from long ago"


def some_members(number: int) -> list[Member]:
    return [Member(Identity.generate().peer_id, "s") for _ in range(number)]


async def test_strangers_crowd_out_nobody(monkeypatch: object) -> None:
    """However many say that they take part: who is a member is asked, and goes on with whoever was one lately."""
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "JOIN_REQUEST_LASTS_S", 600.0)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    lately, *strangers = some_members(5 * ASKED_MAX)
    start, signed = begun(me, (Member("gone", "s"), Member(peer.peer_id, "s")))
    before = msgspec.structs.replace(start, members=(*start.members, lately))
    left = say.HeadReport(start, Member(peer.peer_id, "s"), "training", signed)
    on = await regrouped_by(after(start, signed), left, me, peer, (before,), crowd=(lately, *strangers))
    assert on is not None and len(on.members) == MAX_PEERS
    assert {left.member, lately} < set(on.members)


async def test_all_members_of_a_large_group_are_asked() -> None:
    me = Identity.generate()
    start, signed = begun(me, tuple(some_members(2 * ASKED_MAX)))
    crowd = [member.peer for member in some_members(5 * ASKED_MAX)]
    async with (
        open_host(HostConfig(identity=me, events=EventLog())) as host,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as last,
    ):
        members = [member.peer for member in start.members]
        authority = Authority(host, FIRST, 1, lambda: crowd, after(start, signed))
        asked = authority._whom_to_ask()
        assert asked[: len(members)] == members and set(asked) == {*members, *crowd}

        CoordinatorHandlers(last, [Authority(last, FIRST, 1, list, DurableState())])
        await host.connect_address(last.addresses[0], timeout_s=30)
        for most, answers in ((len(members), 0), (len(members) + 1, 1)):
            asking = [*members, last.peer_id]
            head_reports = await ask_head_reports(host.rpc, asking, timeout_s=60, group="run", most=most)
            assert len(head_reports) == answers


# -- groups -----------------------------------------------------------------------------------------------------------


def first_of(group: str) -> Head:
    return genesis(group, group.encode().ljust(32, b"."))


async def test_a_stage_without_replicas_goes_on_from_a_kept_commit_beside_the_others(monkeypatch: object) -> None:
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    kept = msgspec.structs.replace(start, round=5, previous=start.hash, inner_step=50)
    last = msgspec.structs.replace(start, round=7, previous=b"6" * 32, inner_step=70)
    forged = msgspec.structs.replace(kept, state_hash=b"x" * 32)

    def beside(head: Head) -> Head:
        return msgspec.structs.replace(head, round=8, inner_step=80)

    for head, seen, expected in ((kept, (kept,), 8), (forged, (kept,), None), (kept, (), None)):
        report = say.HeadReport(head, Member(peer.peer_id, "replacement"), "joining", signed)
        within_s = NEVER_S if expected is None else 60.0
        on = await regrouped_by(after(last, signed), report, me, peer, seen, beside, within_s=within_s)
        assert (on.round if on is not None else None) == expected
        if on is not None:
            assert (on.term, on.inner_step, on.state_hash) == (2, 80, kept.state_hash)
            assert on.previous == kept.hash and on.members == (report.member,)


async def test_a_head_that_was_made_up_is_nothing_to_go_on_from(monkeypatch: object) -> None:
    """The stage has no replica left. A stranger stands at a head of its own, whose only member it is."""
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    last = msgspec.structs.replace(start, round=7, previous=b"6" * 32)
    beside = msgspec.structs.replace(first_of("beside"), round=8)
    stranger = Member(peer.peer_id, "s")
    for round in (2**50, 8, 7):
        forged = msgspec.structs.replace(last, round=round, state_hash=b"x" * 32, members=(stranger,))
        durable = after(last, signed)
        report = say.HeadReport(forged, stranger, "training", signed)
        on = await regrouped_by(
            durable, report, me, peer, fast_forward=lambda head: head, others=(beside,), within_s=NEVER_S
        )
        assert on is None and durable.seen is not None and durable.seen.head == last


async def test_where_nobody_known_comes_back_strangers_are_the_stage(monkeypatch: object) -> None:
    """Everybody has come and gone while the authority was away."""
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "STRANGERS_AFTER_S", 0.5)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    stranger = Member(peer.peer_id, "s")
    theirs = msgspec.structs.replace(start, round=40, previous=b"6" * 32, members=(stranger,))
    durable = after(msgspec.structs.replace(start, round=7, previous=b"5" * 32), signed)
    report = say.HeadReport(theirs, stranger, "training", signed)

    def believed() -> bool:
        return durable.seen is not None and durable.seen.head == theirs

    await regrouped_by(durable, report, me, peer, fast_forward=lambda head: head, until=believed)
    assert believed()


async def test_whom_a_stage_s_authority_believes() -> None:
    me = Identity.generate()
    start, signed = begun(me, (Member("member", "s"),))
    earlier = msgspec.structs.replace(start, round=6, members=(Member("before", "s"),))
    last = msgspec.structs.replace(start, round=7, previous=earlier.hash)
    async with open_host(HostConfig(identity=me, events=EventLog())) as host:

        def believed(peer: str, head: bytes, others_at: int) -> list[int]:
            beside = Authority(
                host, msgspec.structs.replace(first_of("beside"), round=others_at), 1, list, DurableState()
            )
            durable = after(earlier, signed)
            authority = Authority(
                host, FIRST, 1, list, durable, 20, fast_forward=lambda head: head, others=lambda: [beside]
            )
            for seen in (earlier, last):
                authority._see(seen)
            return [round for round in (5, 6, 7, 8, 13, 14, 20, 21) if authority.believes(peer, head, round)]

        unseen = b"u" * 32
        assert believed("member", unseen, 7) == [5, 6, 7, 8, 13, 14, 20], "up to the end of the run"
        assert believed("before", unseen, 7) == [8, 13, 14, 20], "what we did not see"
        assert believed("stranger", unseen, 8) == []
        assert believed("stranger", unseen, 12) == [8, 13], "we have been away: the others went on with that stage"
        for head in (earlier, last):
            assert head.round in believed("stranger", head.hash, 8)


async def test_a_restarted_authority_knows_what_it_saw_before(tmp_path: Path, monkeypatch: object) -> None:
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.4)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member("gone1", "s"), Member("gone2", "s")))
    kept = msgspec.structs.replace(start, round=5, previous=start.hash)
    between = msgspec.structs.replace(start, round=6, previous=kept.hash)
    last = msgspec.structs.replace(start, round=7, previous=between.hash)
    durable = FileState(Home(tmp_path))
    durable.keep(signed)
    for head in (start, kept, between, last):
        durable.see(head, STAGE_BACK_S_MAX)
    del durable

    report = say.HeadReport(kept, Member(peer.peer_id, "replacement"), "joining", signed)
    restarted = FileState(Home(tmp_path))
    on = await regrouped_by(restarted, report, me, peer, fast_forward=lambda head: head)
    assert on is not None and (on.term, on.round, on.previous) == (2, 5, kept.hash)
    again = FileState(Home(tmp_path))
    assert again.signed == restarted.signed and again.seen == restarted.seen


async def test_the_authority_tells_which_heads_it_would_go_on_from() -> None:
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
        CoordinatorHandlers(host, [Authority(host, FIRST, 1, list, durable, fast_forward=lambda head: head)])
        await other.connect_address(host.addresses[0], timeout_s=30)
        asked = say.AskBelieved("run", tuple((head.hash, head.round) for head in (start, kept, never, last, later)))
        answer = (await other.rpc.call(host.peer_id, say.BELIEVED, asked, timeout_s=30)).body
        assert answer.heads == (kept.hash, last.hash) and answer.last == last.position


async def test_each_group_begins_once_the_run_has_enough_peers(monkeypatch: object) -> None:
    """Two peers suffice, whichever groups they are in; a group without a peer waits for its first."""
    monkeypatch.setattr(module, "JOIN_REQUEST_LASTS_S", 600.0)  # type: ignore[attr-defined]
    async with (
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as one,
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as two,
        trio.open_nursery() as nursery,
    ):
        authorities: list[Authority] = []
        for number, group in enumerate(("g0", "g1", "g2")):
            others = [n for n in range(3) if n != number]
            elsewhere = lambda others=others: sum(authorities[n].peers for n in others)  # noqa: E731
            authorities.append(Authority(host, first_of(group), 2, list, DurableState(), elsewhere=elsewhere))
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
        await trio.sleep(2 * module.ROUND_TRIP_S)
        assert not (await request_join(one, "g0")).head.members, "one peer of two"
        await request_join(two, "g2")
        heads = [await begun(one, "g0"), await begun(two, "g2")]
        assert [[m.peer for m in head.members] for head in heads] == [[one.peer_id], [two.peer_id]]
        assert not authorities[1].begun
        assert [m.peer for m in (await begun(two, "g1")).members] == [two.peer_id], "now its first peer will do"

        with pytest.raises(RemoteError, match="no such group") as refused:
            await request_join(one, "g7")
        assert refused.value.code == "RoundError", "no strike"
        with pytest.raises(RemoteError, match="no such group"):
            await one.rpc.call(host.peer_id, say.HEAD_REPORT, say.AskHead(), timeout_s=30)  # which of three?
        asked = await ask_head_reports(one.rpc, [host.peer_id], timeout_s=60, group="g2")
        assert [report.head.run_id for _, report in asked] == ["g2"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("phase", [say.NO_MAJORITY, "training"])
async def test_of_two_the_one_left_goes_on_soon_if_it_misses_the_other(phase: str, monkeypatch: object) -> None:
    """The dead one is one of two: it cannot go on elsewhere. While its partner does not miss it, it may be the
    authority alone that does not reach it."""
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 1000.0)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    start, signed = begun(me, (Member(peer.peer_id, "s"), Member("dead", "s")))
    left = say.HeadReport(start, Member(peer.peer_id, "s"), phase, signed)
    within_s = 60.0 if phase == say.NO_MAJORITY else NEVER_S
    alone = await regrouped_by(after(start, signed), left, me, peer, within_s=within_s)
    assert (alone is not None and alone.members == (left.member,)) if phase == say.NO_MAJORITY else alone is None


async def test_a_majority_that_hung_up_on_us_is_waited_for(monkeypatch: object) -> None:
    """Three of four could go on without the one that is left."""
    monkeypatch.setattr(module, "ROUND_TRIP_S", 0.1)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "GONE_AFTER_S", 1000.0)  # type: ignore[attr-defined]
    me, peer = Identity.generate(), Identity.generate()
    dead = tuple(Member(f"dead{letter}", "s") for letter in "abc")
    start, signed = begun(me, (Member(peer.peer_id, "s"), *dead))
    left = say.HeadReport(start, Member(peer.peer_id, "s"), say.NO_MAJORITY, signed)
    assert await regrouped_by(after(start, signed), left, me, peer, within_s=NEVER_S) is None


# -- whom it follows --------------------------------------------------------------------------------------------------

A, B, C, LIAR, D, E = (Member(name, "s") for name in ("a", "b", "c", "liar", "d", "e"))


class Watched:
    """An authority of one group that was at round 5 of `members` when it was (re)started, and hears what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, members: tuple[Member, ...], rounds: int = 0) -> None:
        me = Identity.generate()
        self.host: Any = SimpleNamespace(peer_id=me.peer_id, identity=me, events=EventLog(), rpc=None, connected=set())
        self.start, self.signed = begun(me, members)
        self.last = self.later(5, members)
        self.authority = Authority(self.host, FIRST, 1, list, after(self.last, self.signed), rounds)
        monkeypatch.setattr(module, "ask_head_reports", self._ask)

    def later(self, round: int, members: tuple[Member, ...]) -> Head:
        return msgspec.structs.replace(self.start, round=round, previous=b"p" * 32, members=members)

    async def _ask(self, *_: object, **__: object) -> list[tuple[str, say.HeadReport]]:
        return self._said

    async def hears(self, head: Head, *members: Member, lie: Head | None = None) -> Head:
        """Where it is after a poll in which those members stand at `head`, and the liar at its `lie`."""
        stand = [(head, member) for member in members] + ([(lie, LIAR)] if lie is not None else [])
        self._said = [(who.peer, say.HeadReport(where, who, "training", self.signed)) for where, who in stand]
        await self.authority._watch()
        return self.authority.head


async def test_a_member_heard_alone_does_not_take_the_authority_away(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """It is a billion rounds further on, it says, in a group of its own, and that has the authority's signature."""
    members = (A, B, C, LIAR)
    watched = Watched(monkeypatch, members)
    absurd = watched.later(10**9, (LIAR,))
    for others in ((), (A,), (C,)):
        assert await watched.hears(watched.last, *others, lie=absurd) == watched.last
        mock_clock.jump(module.GONE_AFTER_S - 1)
        theirs = watched.later(watched.last.round + 1, members)
        assert await watched.hears(theirs, A, B, C, lie=absurd) == theirs, "the others answer again"
        watched.last = theirs
    await watched.hears(watched.last, A, lie=absurd)
    mock_clock.jump(module.GONE_AFTER_S)
    watched._said = []
    await watched.authority._watch()
    assert await watched.hears(watched.last, A, lie=absurd) == watched.last, "we were cut off: they may answer as well"


async def test_whoever_is_regrouped_is_not_soon_given_up_too(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    watched = Watched(monkeypatch, (A, B, C, LIAR))
    await watched.hears(watched.last, A, LIAR)
    mock_clock.jump(module.GONE_AFTER_S)
    left = watched.later(6, (A, LIAR))
    watched.authority._see(left)
    assert await watched.hears(left, lie=watched.later(10**9, (LIAR,))) == left, "A was late once"


async def test_no_head_is_beyond_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock) -> None:
    watched = Watched(monkeypatch, (A, LIAR), rounds=20)
    for _ in range(3):
        await watched.hears(watched.last, lie=watched.later(21, (LIAR,)))
        mock_clock.jump(module.GONE_AFTER_S)
    assert watched.authority.head == watched.last and not watched.authority.completed.is_set()


@pytest.mark.parametrize("now", [(A, D, E), (C, D, E), (D, E)], ids=["one is left", "another one", "nobody is left"])
async def test_a_run_whose_members_were_replaced_while_we_were_away_is_followed(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock, now: tuple[Member, ...]
) -> None:
    watched = Watched(monkeypatch, (A, B, C), rounds=40)
    assert await watched.hears(watched.later(38, now), *now) == watched.last
    mock_clock.jump(module.GONE_AFTER_S)
    for round in (38, 39, 40):  # from then on without delay
        theirs = watched.later(round, now)
        assert await watched.hears(theirs, *now) == theirs
    assert watched.authority.completed.is_set()


async def test_members_that_die_or_are_replaced_one_by_one_are_followed_at_once(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    watched = Watched(monkeypatch, (A, B, C))
    groups = [(A, B), (A, B, D), (B, D), (B, D, E), (D, E)]
    for round, members in enumerate(groups, 6):
        theirs = watched.later(round, members)
        assert await watched.hears(theirs, *members) == theirs


async def test_a_minority_goes_on_that_was_never_followed(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """All of those that the authority knew are gone, and then most of those that took their places."""
    watched = Watched(monkeypatch, (A, B, C))
    theirs, regroups = watched.later(38, (D, E)), list[Head]()

    async def regroup(head: Head, members: Sequence[Member]) -> None:
        regroups.append(head.regrouped(tuple(members), 2))

    monkeypatch.setattr(watched.authority, "_regroup", regroup)
    await watched.hears(theirs, D)
    mock_clock.jump(module.GONE_AFTER_S)
    await watched.hears(theirs, D)
    assert [(head.round, head.members) for head in regroups] == [(38, (D,))]
