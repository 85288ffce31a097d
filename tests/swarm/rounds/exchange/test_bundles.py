"""Slices that are committed to in bundles of two: the same bits, and the right peer is penalized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3
from trio.testing import MockClock

from benchmarks.training.rounds import Rounds
from optim.bundles import Bundles, bundle_hash
from peer.errors import NetworkError, ProtocolViolation, RoundDiscarded
from peer.events import EventLog
from peer.net.method import Method
from swarm.protocol import messages as slices
from swarm.protocol import round_schedule
from swarm.protocol.agreement import events
from swarm.protocol.head import Member
from swarm.protocol.messages import SliceOf
from swarm.rounds.exchange import audits
from swarm.rounds.exchange.link_rates import LinkRates
from swarm.rounds.exchange.round_slices import RoundSlices
from swarm.rounds.exchange.slice_exchange import SliceExchange
from tests.swarm.rounds.test_liars import corrupt_results, lying_norms, other_bytes, relays_other_bytes, soak
from tests.swarm.support.driven_group import GroupSetting, open_driven_group
from tests.swarm.support.hostile import BUNDLED, NUMEL, Liar, deltas, hostile_scene

pytestmark = pytest.mark.slow
ROUNDS = 3


@pytest.fixture(autouse=True)
def few_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five slices of a message are in three bundles, the last one with a single slice."""
    monkeypatch.setattr(round_schedule, "BUNDLES_MAX", 3)


async def test_bundles_change_no_bit(tmp_path: Path) -> None:
    waits: dict[str, Any] = {"grace_s": 20.0}  # else a round begins without one that a busy machine holds up
    setting = GroupSetting(numel=NUMEL, codec="int8", rounds=ROUNDS, schedule=BUNDLED, agreement=waits)
    async with open_driven_group(tmp_path, setting) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(ROUNDS)
        assert all(len(bodies or ()) == 3 for bodies in replicas[0].merged[1:])
        bodies = replicas[0].merged[-1]
        assert bodies and all(len(body.hashes) == len(body.sqnorms) == 3 for body in bodies)
        assert replicas[0].actor.coding.count == 5
        alone = Rounds(setting.strategy, group.theta, 3)
        for number in range(ROUNDS):
            sent: Any = [deltas(replica.peer, number * 4, None) for replica in replicas]  # type: ignore[arg-type]
            alone.exchange(sent, [1, 1, 1])
        for replica in replicas:
            for mine, theirs in zip(replica.state.tensors, alone.tensors, strict=True):
                assert torch.equal(mine, theirs)
        group.check()


def lists_other_hashes(liar: Liar) -> None:
    """Lists hashes of its slices, where its bundle has several, that are not those committed to."""

    def change(peer: str, body: SliceOf, payload: bytes) -> tuple[SliceOf, bytes]:
        return msgspec.structs.replace(body, hashes=body.hashes[::-1]), payload

    liar.sends(slices.CONTRIBUTION, change)


def lists_nothing(liar: Liar) -> None:
    liar.sends(slices.CONTRIBUTION, lambda peer, body, payload: (msgspec.structs.replace(body, hashes=()), payload))


def spoils_second_slices(liar: Liar) -> None:
    """Sends other bytes only of the last slices of its bundles."""
    liar.sends(slices.CONTRIBUTION, lambda peer, body, payload: (body, payload[::-1] if body.index % 2 else payload))


PENALIZED = [
    soak(other_bytes),
    soak(relays_other_bytes),
    soak(lying_norms),
    soak(corrupt_results),
    soak(lists_other_hashes),
    soak(lists_nothing),
    spoils_second_slices,
]


@pytest.mark.parametrize("attack", PENALIZED)
async def test_a_liar_is_penalized_and_left_out(tmp_path: Path, attack: Any) -> None:
    async with hostile_scene(tmp_path, attack, schedule=BUNDLED) as scene:
        await scene.group.until(scene.penalties)
        await scene.rounds(2)


async def test_an_audit_learns_the_hashes_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "SHARE", 1.0)
    async with hostile_scene(tmp_path, schedule=BUNDLED) as scene:

        def judged() -> list[Any]:
            events = [event for member in scene.honest for event in member.seen("slice_audited")]
            fields: list[Any] = [event.fields for event in events]
            return [one for one in fields if one["slice"] < 4 and one["is_true"] is not None]

        await scene.group.until(lambda: len(judged()) >= 3)
        assert all(one["is_true"] for one in judged())
        assert not scene.penalties()


# -- one exchange at one peer --------------------------------------------------------------------------------------

ME, OWNER, OTHER = Member("A", "A0"), Member("B", "B0"), Member("C", "C0")
DATA = [memoryview(bytes([number]) * 4) for number in range(3)]
HASHES = [blake3(data).digest() for data in DATA]
BUNDLES = Bundles(3, 2)


def exchange_at(
    owners: list[str], host: Any, body: Any, feed: Callable[[events.Event], None] = lambda event: None, **coding: Any
) -> SliceExchange:
    """Return an exchange of three slices in two bundles at A."""
    parts = {ME: tuple(index for index, owner in enumerate(owners) if owner == ME.peer)}
    order: Any = SimpleNamespace(
        merged=[body],
        peers=[body.member.peer],
        owners=owners,
        parts=parts,
        indices=range(3),
        bundles=BUNDLES,
        empty_results=(b"empty 0", b"empty 1"),
        key=b"key",
        before=SimpleNamespace(members=(ME, OWNER, OTHER)),
        coding=SimpleNamespace(message_bytes=lambda index: 4, result_bytes=lambda index, senders: 4, **coding),
    )
    context: Any = SimpleNamespace(me=ME, host=host, events=EventLog(), links=LinkRates(host))
    return SliceExchange(context, order, (), RoundSlices(), 10.0, feed)


async def test_a_peer_that_passes_a_slice_on_is_not_blamed_where_it_does_not_decode() -> None:
    def fails(index: int, data: memoryview) -> float:
        raise ProtocolViolation("it does not decode")

    server = Server()
    host = SimpleNamespace(rpc=SimpleNamespace(server=server), suspects=frozenset())
    body: Any = SimpleNamespace(member=OTHER, hashes=BUNDLES.hashes(HASHES), sqnorms=(1.0, 1.0))
    exchange = exchange_at(["A", "A", "A"], host, body, message_sqnorm=fails)
    with pytest.raises(RoundDiscarded):
        await exchange.take_contribution(SliceOf(b"key", 2, "C"), "B", DATA[2])
    assert server.penalized == ["C"]


async def test_where_nothing_is_merged_each_owner_names_its_bundles(autojump_clock: MockClock) -> None:
    """The owner of the second bundle owns the third slice, and not the second."""
    told: list[events.Event] = []
    for owner in ("A", "B"):
        body: Any = SimpleNamespace(member=OTHER)
        exchange = exchange_at(["A", "A", "B"], SimpleNamespace(rpc=None, suspects=frozenset()), body, feed=told.append)
        exchange._me = owner
        exchange.order.merged.clear()
        exchange.order.indices = exchange.order.filled = range(0)  # type: ignore[misc]
        await exchange._merge_nothing()
    assert told == [events.SliceResult(b"key", 0, b"empty 0"), events.SliceResult(b"key", 1, b"empty 1")]


class Holder:
    """Peers that have results, by (peer, index). `asked`: what was fetched of whom."""

    def __init__(self, results: dict[tuple[str, int], memoryview]) -> None:
        self._results, self.asked = results, list[tuple[str, int]]()

    async def call(self, peer: str, method: Method[Any, Any], body: SliceOf, **_: object) -> Any:
        self.asked.append((peer, body.index))
        if (peer, body.index) not in self._results:
            raise NetworkError("it has not got that")
        return SimpleNamespace(payload=self._results[peer, body.index])


async def test_only_what_lacks_of_a_bundle_is_fetched(autojump_clock: MockClock) -> None:
    """Its owner ended after the first slice."""
    rpc = Holder({("C", 1): DATA[1]})
    body = SimpleNamespace(member=OTHER, hashes=BUNDLES.hashes(HASHES), sqnorms=(1.0, 1.0))
    exchange = exchange_at(["B", "B", "A"], SimpleNamespace(rpc=rpc, suspects=frozenset()), body)
    await exchange.take_result(SliceOf(b"key", 0), "A", DATA[0])
    assert await exchange.result(0, bundle_hash(HASHES[:2]), ["C"]) == DATA[:2]
    assert rpc.asked == [("B", 1), ("C", 1)]


async def test_a_bundle_is_fetched_whole_where_its_owner_has_sent_another_result(autojump_clock: MockClock) -> None:
    rpc = Holder({("B", 0): DATA[2], ("B", 1): DATA[1], ("C", 0): DATA[0], ("C", 1): DATA[1]})
    body = SimpleNamespace(member=OTHER, hashes=BUNDLES.hashes(HASHES), sqnorms=(1.0, 1.0))
    exchange = exchange_at(["B", "B", "A"], SimpleNamespace(rpc=rpc, suspects=frozenset()), body)
    await exchange.take_result(SliceOf(b"key", 0), "A", DATA[2])
    assert await exchange.result(0, bundle_hash(HASHES[:2]), ["C"]) == DATA[:2]
    with pytest.raises(NetworkError, match="no peer has the result"):
        await exchange.result(0, bytes(32), ["C"])


class Server:
    def __init__(self) -> None:
        self.penalized = list[str]()

    def penalize(self, peer: str, reason: str) -> None:
        self.penalized.append(peer)


async def test_a_peer_that_passes_a_slice_on_is_not_blamed_for_its_contributors_norm() -> None:
    """The slices are those committed to, so the peer between them could not know."""
    server = Server()
    host = SimpleNamespace(rpc=SimpleNamespace(server=server), suspects=frozenset())
    body: Any = SimpleNamespace(member=OTHER, hashes=BUNDLES.hashes(HASHES), sqnorms=(5.0, 1.0))
    exchange = exchange_at(["A", "A", "A"], host, body, message_sqnorm=lambda index, data: 2.0)
    listed = tuple(HASHES[:2])
    for index in (0, 1):
        exchange.expect_contribution(SliceOf(b"key", index, "C", listed), "B", 4)
    await exchange.take_contribution(SliceOf(b"key", 0, "C", listed), "B", DATA[0])
    with pytest.raises(RoundDiscarded):
        await exchange.take_contribution(SliceOf(b"key", 1, "C", listed), "B", DATA[1])
    assert server.penalized == ["C"]
    with pytest.raises(ProtocolViolation, match="another norm"):  # from the contributor itself
        await exchange.take_contribution(SliceOf(b"key", 1, "", listed), "C", DATA[1])
    assert exchange.input_of(0, body) == DATA[0] and exchange.input_of(1, body) is None
