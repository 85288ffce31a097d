"""Which heads an authority follows, poll after poll."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from trio.testing import MockClock

from peer.events import EventLog
from peer.identity import Identity
from swarm.coordinator import authority as module
from swarm.coordinator.authority import Authority
from swarm.coordinator.rules import GroupRules, RegroupTimeouts
from swarm.protocol import messages as say
from swarm.protocol.head import Head, Member
from tests.swarm.coordinator.regroup_scene import FIRST, after, begun

GONE_S = RegroupTimeouts().gone_s
A, B, C, LIAR, D, E = (Member(name, "s") for name in ("a", "b", "c", "liar", "d", "e"))


class Watched:
    """A restarted authority of a group that was at round 5 of `members`. It hears what `hears` is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, members: tuple[Member, ...], rounds: int = 0) -> None:
        me = Identity.generate()
        parts = {"events": EventLog(), "rpc": None, "connected": set(), "remote_ip": lambda peer: None}
        self.host: Any = SimpleNamespace(peer_id=me.peer_id, identity=me, **parts)
        self.start, self.signed = begun(me, members)
        self.last = self.later(5, members)
        self.authority = Authority(
            self.host, GroupRules(genesis=FIRST, rounds=rounds), after(self.last, self.signed), list
        )
        monkeypatch.setattr(module, "ask_head_reports", self._ask)

    def later(self, round: int, members: tuple[Member, ...]) -> Head:
        return msgspec.structs.replace(self.start, round=round, previous=b"p" * 32, members=members)

    async def _ask(self, *_: object, **__: object) -> list[tuple[str, say.HeadReport]]:
        return self._said

    async def hears(self, head: Head, *members: Member, lie: Head | None = None) -> Head:
        """Return its head after a poll in which those members report `head`, and the liar reports `lie`."""
        heads = [(head, member) for member in members] + ([(lie, LIAR)] if lie is not None else [])
        self._said = [(who.peer, say.HeadReport(where, who, "training", regroup=self.signed)) for where, who in heads]
        await self.authority._poll()
        return self.authority.head


async def test_a_member_heard_alone_does_not_take_the_authority_away(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """It reports a head a billion rounds later, of a group of its own, with a valid signature of the authority."""
    members = (A, B, C, LIAR)
    watched = Watched(monkeypatch, members)
    absurd = watched.later(10**9, (LIAR,))
    for others in ((), (A,), (C,)):
        assert await watched.hears(watched.last, *others, lie=absurd) == watched.last
        mock_clock.jump(GONE_S - 1)
        theirs = watched.later(watched.last.round + 1, members)
        assert await watched.hears(theirs, A, B, C, lie=absurd) == theirs, "the others answer again"
        watched.last = theirs
    await watched.hears(watched.last, A, lie=absurd)
    mock_clock.jump(GONE_S)
    watched._said = []
    await watched.authority._poll()
    assert await watched.hears(watched.last, A, lie=absurd) == watched.last, "the others may be back as well"


async def test_a_new_group_has_all_of_its_time(monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock) -> None:
    watched = Watched(monkeypatch, (A, B, C, LIAR))
    await watched.hears(watched.last, A, LIAR)
    mock_clock.jump(GONE_S)
    left = watched.later(6, (A, LIAR))
    watched.authority._see(left)
    assert await watched.hears(left, lie=watched.later(10**9, (LIAR,))) == left, "A was late once"


async def test_no_head_lies_beyond_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock) -> None:
    watched = Watched(monkeypatch, (A, LIAR), rounds=20)
    for _ in range(3):
        await watched.hears(watched.last, lie=watched.later(21, (LIAR,)))
        mock_clock.jump(GONE_S)
    assert watched.authority.head == watched.last and not watched.authority.completed.is_set()


@pytest.mark.parametrize("now", [(A, D, E), (C, D, E), (D, E)], ids=["one is left", "another one", "none is left"])
async def test_a_run_whose_members_were_all_replaced_is_followed(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock, now: tuple[Member, ...]
) -> None:
    watched = Watched(monkeypatch, (A, B, C), rounds=40)
    assert await watched.hears(watched.later(38, now), *now) == watched.last
    mock_clock.jump(GONE_S)
    for round in (38, 39, 40):  # from then on without delay
        theirs = watched.later(round, now)
        assert await watched.hears(theirs, *now) == theirs
    assert watched.authority.completed.is_set()


async def test_members_replaced_one_by_one_are_followed_at_once(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    watched = Watched(monkeypatch, (A, B, C))
    groups = [(A, B), (A, B, D), (B, D), (B, D, E), (D, E)]
    for round, members in enumerate(groups, 6):
        theirs = watched.later(round, members)
        assert await watched.hears(theirs, *members) == theirs


async def test_a_minority_that_was_never_followed_is_regrouped(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """All peers that the authority knew are gone, and then most of those that replaced them."""
    watched = Watched(monkeypatch, (A, B, C))
    theirs, regroups = watched.later(38, (D, E)), list[Head]()

    async def regroup(head: Head, members: Sequence[Member]) -> None:
        regroups.append(head.regrouped(tuple(members), 2))

    monkeypatch.setattr(watched.authority, "_regroup", regroup)
    await watched.hears(theirs, D)
    mock_clock.jump(GONE_S)
    await watched.hears(theirs, D)
    assert [(head.round, head.members) for head in regroups] == [(38, (D,))]
