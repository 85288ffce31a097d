"""The calls between the peers of a group: messages of the agreement, and slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from peer.errors import InOtherGroup, RoundDiscarded
from peer.net.method import Call, Empty
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


class SliceHandlers:
    """Takes and serves the slices of one replica's exchanges."""

    def __init__(self, rpc: Rpc, actor: ReplicaActor) -> None:
        self._actor = actor
        rpc.register(CONTRIBUTION, self._on_contribution, self._expect_contribution)
        rpc.register(RELAY, self._on_relay, self._expect_relay)
        rpc.register(RESULT, self._on_result, self._expect_result)
        rpc.register(FETCH_RESULT, self._on_fetch)

    async def _expect_contribution(self, peer: str, asked: SliceOf, size_bytes: int) -> None:
        exchange = await self._actor.exchange_named(asked.key, peer)
        exchange.expect_contribution(asked, peer, size_bytes)

    async def _expect_relay(self, peer: str, asked: SliceOf, size_bytes: int) -> None:
        exchange = await self._actor.exchange_named(asked.key, peer)
        exchange.expect_relay(asked, peer, size_bytes)

    async def _expect_result(self, peer: str, asked: SliceOf, size_bytes: int) -> None:
        exchange = await self._actor.exchange_named(asked.key, peer)
        exchange.expect_result(asked, peer, size_bytes)

    async def _on_contribution(self, call: Call[SliceOf]) -> Empty:
        exchange = await self._actor.exchange_named(call.body.key, call.peer)
        await exchange.take_contribution(call.body, call.peer, call.payload)
        return Empty()

    async def _on_relay(self, call: Call[SliceOf]) -> Empty:
        exchange = await self._actor.exchange_named(call.body.key, call.peer)
        await exchange.pass_on(call.body.index, call.peer, call.payload)
        return Empty()

    async def _on_result(self, call: Call[SliceOf]) -> Empty:
        exchange = await self._actor.exchange_named(call.body.key, call.peer)
        await exchange.take_result(call.body.index, call.payload)
        return Empty()

    async def _on_fetch(self, call: Call[SliceOf]) -> tuple[Empty, Buffer]:
        key, index = call.body.key, call.body.index
        exchange = self._actor.exchanges.get(key)
        if exchange is not None and index in exchange.results:
            return Empty(), exchange.results[index][1]
        part = self._actor.builder.part(key, index)
        if part is None:
            raise RoundDiscarded("this peer does not have that result")
        return Empty(), part
