"""The calls between the peers of a group: messages of the agreement, and slices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from peer.errors import InOtherGroup, RoundDiscarded
from peer.net.method import Call, Empty, Method
from peer.net.rpc import Buffer, Rpc
from swarm.protocol.messages import (
    CONTRIBUTION,
    FETCH_RESULT,
    HEAD_REPORT,
    HEADS,
    RELAY,
    RESULT,
    AskHead,
    AskHeads,
    HeadPage,
    HeadReport,
    SliceOf,
)
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.group_driver import GroupDriver
from swarm.rounds.messages import AGREE, MessageBatch
from swarm.rounds.replica_actor import ReplicaActor


def serve_agreement(rpc: Rpc, drivers: Callable[[], Mapping[str, GroupDriver]]) -> None:
    """Hand messages to the nodes of the groups that they name."""

    async def on_message(call: Call[MessageBatch]) -> Empty:
        driver = drivers().get(call.body.group)
        if driver is None:
            raise InOtherGroup
        await driver.take(call.peer, call.body.messages)
        return Empty()

    rpc.register(AGREE, on_message)


def serve_heads(rpc: Rpc, drivers: Callable[[], Mapping[str, GroupDriver]]) -> None:
    """Tell any peer the heads of these groups, with their proofs, and what led to them."""

    def driver_of(group: str) -> GroupDriver:
        found = drivers()
        driver = found.get(group) if group else next(iter(found.values())) if len(found) == 1 else None
        if driver is None:
            raise InOtherGroup
        return driver

    async def on_ask(call: Call[AskHead]) -> HeadReport:
        return driver_of(call.body.group).report()

    async def on_ask_heads(call: Call[AskHeads]) -> HeadPage:
        return HeadPage(driver_of(call.body.group).page(call.body.head, call.body.after))

    rpc.register(HEAD_REPORT, on_ask)
    rpc.register(HEADS, on_ask_heads)


Expect = Callable[[SliceExchange, SliceOf, str, int], None]
Take = Callable[[SliceExchange, SliceOf, str, memoryview], Awaitable[None]]


def serve_slices(rpc: Rpc, actor: ReplicaActor) -> None:
    """Take and serve the slices of one replica's exchanges."""

    def register(method: Method[SliceOf, Empty], expect: Expect, take: Take) -> None:
        async def on_header(peer: str, asked: SliceOf, size_bytes: int) -> None:
            expect(await actor.exchange_named(asked.key, peer), asked, peer, size_bytes)

        async def on_slice(call: Call[SliceOf]) -> Empty:
            await take(await actor.exchange_named(call.body.key, call.peer), call.body, call.peer, call.payload)
            return Empty()

        rpc.register(method, on_slice, on_header)

    async def on_fetch(call: Call[SliceOf]) -> tuple[Empty, Buffer]:
        key, index = call.body.key, call.body.index
        exchange = actor.exchanges.get(key)
        if exchange is not None and index in exchange.results:
            return Empty(), exchange.results[index][1]
        part = actor.builder.part(key, index)
        if part is None:
            raise RoundDiscarded("this peer does not have that result")
        return Empty(), part

    register(CONTRIBUTION, SliceExchange.expect_contribution, SliceExchange.take_contribution)
    register(RELAY, SliceExchange.expect_relay, SliceExchange.pass_on)
    register(RESULT, SliceExchange.expect_result, SliceExchange.take_result)
    rpc.register(FETCH_RESULT, on_fetch)
