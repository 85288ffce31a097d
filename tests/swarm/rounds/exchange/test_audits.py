"""Owners whose results are not the merge of what they were sent, and members that accuse honest owners."""

from __future__ import annotations

from collections import Counter
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from blake3 import blake3

from peer.errors import RemoteError, RoundDiscarded
from peer.footprint import kept
from peer.identity import Identity
from swarm.protocol.head import Member
from swarm.protocol.messages import ACCUSE, SHOW, SliceOf
from swarm.rounds.exchange import audits
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.trainers.contribution import as_bytes
from tests.swarm.support.hostile import Liar, Scene, hostile_scene

pytestmark = pytest.mark.slow


@pytest.fixture
def false_merges(monkeypatch: pytest.MonkeyPatch) -> list[Liar]:
    """The peers whose results are reversed: all members get the same bytes, and their norm is in order. Only where no
    member can merge again what they do not show: they have contributed, and no owner of an exchange that failed earlier
    in the round has what they sent."""
    liars: list[Liar] = []
    monkeypatch.setattr(audits, "SHARE", 1.0)
    monkeypatch.setattr(audits, "UNSHOWN_MAX", 2)
    honest = SliceExchange._merge

    def merge(exchange: SliceExchange, index: int) -> tuple[memoryview, bytes]:
        result, name = honest(exchange, index)
        has_contributed = any(body.member.peer == exchange._me for body in exchange.order.merged)
        liar = next((liar for liar in liars if liar.peer == exchange._me), None)
        if liar is not None and has_contributed and exchanges(liar, exchange.order.round_info.round) == 1:
            values = torch.frombuffer(bytearray(result), dtype=torch.float32)
            result = as_bytes((-values).view(torch.uint8))
            name = blake3(result).digest()
        return result, name

    monkeypatch.setattr(SliceExchange, "_merge", merge)
    return liars


def exchanges(liar: Liar, round: int) -> int:
    """Return how many exchanges of a round a peer has begun."""
    entered = [event.fields for event in liar.member.seen("phase_entered")]
    return len([fields for fields in entered if fields["phase"] == "exchange" and fields["round"] == round])


async def until_put_out(scene: Scene) -> None:
    """Wait until the members have committed a head without the liar."""
    group, liar = scene.group, scene.liar.member.driver.me
    await group.until(lambda: all(member.head.has(liar) for member in scene.honest))
    await group.until(lambda: all(not member.head.has(liar) for member in scene.honest))


@pytest.mark.parametrize(
    ("shows", "reason"),
    [
        pytest.param(True, "is not the merge", id="shows what it merged"),
        pytest.param(False, "has not shown what it merged", id="shows nothing", marks=pytest.mark.soak),
    ],
)
async def test_an_owner_that_merges_falsely_is_put_out(
    tmp_path: Path, false_merges: list[Liar], shows: bool, reason: str
) -> None:
    """Every certificate is in order: all members have built the same state from the owner's results."""

    def lie(liar: Liar) -> None:
        false_merges.append(liar)
        if not shows:
            served: Any = liar.member.host.rpc.server._methods[SHOW.name]
            served.handler = refuse

    async def refuse(call: object) -> None:
        raise RoundDiscarded("it does not show that")

    async with hostile_scene(tmp_path, lie) as scene:
        await until_put_out(scene)
        assert any(reason in penalty for penalty in scene.penalties())
        found = [event for member in scene.honest for event in member.seen("slice_audited")]
        false = {event.fields["peer"] for event in found if event.fields["is_true"] is False}
        assert false == ({scene.liar.peer} if shows else set())
        await scene.rounds(3)


async def test_audits_find_nothing_where_all_are_honest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SHARE", 1.0)
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(6)
        found = [event for member in scene.honest for event in member.seen("slice_audited")]
        assert len(found) >= 6 and not [event for event in found if event.fields["is_true"] is False]
        assert not scene.penalties()


async def test_kept_exchanges_and_results_lie_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all but the last commit, of which nobody asks for more than audits and late members do."""
    monkeypatch.setattr(audits, "SHARE", 1.0)
    monkeypatch.setattr(kept, "SMALL_BYTES", 0)
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(kept.AUDITED + 2)
        for member in scene.honest:
            await until_in_files(scene, member)
            served = member.snapshots._results.values()
            assert served and all(isinstance(part.obj, mmap) for result in served for part in result.parts)
        audited = [event for member in scene.honest for event in member.seen("slice_audited")]
        assert audited and all(event.fields["is_true"] is not False for event in audited)
        assert any(event.fields["is_true"] for event in audited) and not scene.penalties()


async def until_in_files(scene: Scene, member: Any) -> None:
    def commits() -> list[Any]:
        return list(member.actor.audits._commits.values())[:-1]

    await scene.group.until(lambda: len(commits()) == kept.AUDITED - 1 and all(map(lies_in_files, commits())))


def lies_in_files(commit: Any) -> bool:
    exchange = commit.exchange
    received = [part.data for part in exchange._slices.received.values()]
    results = [data for _, data in exchange.results.values()]
    return all(isinstance(part.obj, mmap) for part in (*exchange._mine, *received, *results, *commit.results))


async def test_a_member_that_accuses_an_honest_owner_is_struck_itself(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        driver: Any = scene.liar.member.driver
        commits = driver.actor.audits._commits
        await scene.group.until(lambda: bool(commits))
        key, commit = next(reversed(commits.items()))
        judge = next(member for member in scene.honest if member.peer != commit.exchange.owners[0])
        with pytest.raises(RemoteError):
            await scene.liar.call(judge.peer, ACCUSE, SliceOf(key, 0))
        assert any("accused the owner of a slice" in reason for reason in scene.penalties())
        await scene.rounds(2)


async def test_a_commit_that_is_forgotten_before_its_turn_is_not_audited(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        member: Any = scene.honest[0]
        await member.driver.actor.audits.audit(b"k" * 32, member.head)


async def test_a_member_may_leave_while_it_commits(tmp_path: Path) -> None:
    """The weights are written without a place to stop; what follows them begins in a nursery that is cancelled."""
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        member: Any = scene.liar.member
        actor = member.driver.actor
        honest = actor._stand_at

        async def stand_at(*commit: Any) -> None:
            with trio.CancelScope(shield=True):
                await honest(*commit)
                member.stop.cancel()

        actor._stand_at = stand_at
        with trio.fail_after(300):
            await member.gone.wait()
        await scene.group.until(lambda: all(not m.head.has(member.driver.me) for m in scene.honest))


def test_each_slice_of_another_owner_is_drawn_as_often_however_many_it_owns() -> None:
    """As security.md says: of S slices and n contributors a member draws one in S / 32n rounds, from those that it does
    not own; so who owns more is audited more."""
    slices, contributors, rounds = 64, 8, 16_000
    owners = ["me"] * 4 + ["large"] * 32 + [f"small{index % 6}" for index in range(28)]
    order = SimpleNamespace(indices=range(slices), merged=[None] * contributors)
    exchange: Any = SimpleNamespace(order=order, owners=owners)
    auditor: Any = SimpleNamespace(_context=SimpleNamespace(identity=Identity.generate(), me=Member("me", "s")))
    heads: list[Any] = [
        SimpleNamespace(hash=blake3(bytes([index % 256, index // 256])).digest()) for index in range(rounds)
    ]
    drawn = Counter(audits.Audits._draw(auditor, exchange, head) for head in heads)
    done = rounds - drawn.pop(None)
    assert done / rounds == pytest.approx(slices / (32 * contributors), rel=0.1)
    assert all(owners[index] != "me" for index in drawn if index is not None) and len(drawn) == slices - 4
    large = sum(count for index, count in drawn.items() if index is not None and owners[index] == "large")
    assert large / done == pytest.approx(32 / 60, rel=0.1)
