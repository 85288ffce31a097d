"""One exchange of slices at one peer."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from optim.bundles import Bundles
from peer.errors import NetworkError, ProtocolViolation, RoundDiscarded
from peer.events import EventLog
from peer.net.method import Method
from swarm.protocol.agreement import events
from swarm.protocol.head import Member
from swarm.protocol.messages import CONTRIBUTION, RELAY, SliceOf
from swarm.rounds.exchange.link_rates import LinkRates
from swarm.rounds.exchange.round_slices import RoundSlices
from swarm.rounds.exchange.slice_exchange import SliceExchange

ME = Member("A", "A0")


async def test_a_peer_that_restarted_after_it_had_submitted_tells_that_its_update_is_gone(
    autojump_clock: MockClock,
) -> None:
    """Its roster names a contribution of the process before, which has taken the slices with it. The exchange ended the
    new process, too."""
    body = SimpleNamespace(member=ME, hashes=(b"hash",), sqnorms=(1.0,))
    order: Any = SimpleNamespace(
        merged=[body],
        peers=["A"],
        owners=["A"],
        parts={ME: (0,)},
        indices=range(1),
        bundles=Bundles(1),
        key=b"key",
        before=SimpleNamespace(members=(ME,)),
        round_info=SimpleNamespace(round=1),
    )
    host = SimpleNamespace(rpc=None, suspects=frozenset())
    snapshots = SimpleNamespace(stepping_back=nullcontext)
    links: Any = LinkRates(host)  # type: ignore[arg-type]
    context: Any = SimpleNamespace(me=ME, host=host, snapshots=snapshots, events=EventLog(), links=links)
    told: list[events.Event] = []
    exchange = SliceExchange(context, order, (), RoundSlices(), 10.0, told.append)
    with trio.move_on_after(20.0):
        await exchange.run()
    assert told == [events.Missing(b"key", ("A",), ())]


async def test_a_slice_for_an_earlier_incarnation_is_held_against_no_sender() -> None:
    """The peer has lost its disk, so it owns nothing any more. Its honest sender, which knows owners by their peer id,
    was penalized."""
    sender = SimpleNamespace(member=Member("B", "B0"), hashes=(b"hash",), sqnorms=(1.0,))
    coding = SimpleNamespace(message_bytes=lambda index: 1)
    order: Any = SimpleNamespace(
        merged=[sender],
        peers=["B"],
        owners=["A", "C"],
        parts={},
        indices=range(2),
        bundles=Bundles(2),
        key=b"key",
        before=SimpleNamespace(members=(ME, sender.member)),
        coding=coding,
    )
    context: Any = SimpleNamespace(me=Member("A", "A1"), host=SimpleNamespace(rpc=None), events=EventLog())
    exchange = SliceExchange(context, order, (), RoundSlices(), 10.0, lambda event: None)
    with pytest.raises(RoundDiscarded, match="earlier incarnation"):
        exchange.expect_contribution(SliceOf(b"key", 0), "B", 1)
    for index, peer in ((1, "B"), (2, "B"), (0, "D")):
        with pytest.raises(ProtocolViolation):
            exchange.expect_contribution(SliceOf(b"key", index), peer, 1)


async def test_a_slice_goes_by_another_peer_once_its_owner_is_suspected_as_it_is_sent(
    autojump_clock: MockClock,
) -> None:
    """The owner froze, or the link to it went, under the first call. The slice was sent to it again and again, until
    the exchange was over, since another peer was asked only before the first call."""
    mine = SimpleNamespace(member=ME, hashes=(b"hash",), sqnorms=(1.0,))
    order: Any = SimpleNamespace(
        merged=[mine],
        peers=["A"],
        owners=["B"],
        parts={},
        indices=range(1),
        bundles=Bundles(1),
        key=b"key",
        before=SimpleNamespace(members=(ME, Member("B", "B0"), Member("C", "C0"))),
        round_info=SimpleNamespace(round=1),
    )
    called: list[tuple[str, str]] = []
    host = SimpleNamespace(suspects=frozenset[str]())

    class BrokenLink:
        async def call(self, peer: str, method: Method[Any, Any], *_: object, **__: object) -> None:
            called.append((peer, method.name))
            if peer == "B":
                host.suspects = frozenset("B")
                raise NetworkError("the link broke")
            exchange.scope.cancel()

    host.rpc = BrokenLink()
    snapshots, links = SimpleNamespace(stepping_back=nullcontext), LinkRates(host)  # type: ignore[arg-type]
    context: Any = SimpleNamespace(me=ME, host=host, snapshots=snapshots, events=EventLog(), links=links)
    slices = RoundSlices()
    exchange = SliceExchange(context, order, (memoryview(b"data"),), slices, 60.0, lambda event: None)
    with trio.move_on_after(30.0):
        await exchange.run()
    assert called == [("B", CONTRIBUTION.name), ("C", RELAY.name)]
