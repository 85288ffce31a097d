"""The next outer state of one replica: built from results, rebuilt where another build took its place, committed.

The outer state has room for one next state. A state counts as held while the encoded results that lead to it are here:
building it again takes one pass over the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import trio

from peer.errors import BarnraiseError, ProtocolViolation, ResourceError
from swarm.protocol.agreement.round.instance import name_build
from swarm.protocol.head import Head
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.merge_order import MergeOrder
from swarm.rounds.exchange.slice_exchange import THREADS, SliceExchange
from swarm.rounds.result_log import LoggedResult, ResultLog, path_between
from swarm.state.fetch import Fetched

BUILT_MAX: Final = 4  # the accepted state and a candidate, and what a restart has found


class StateBuilder:
    """Builds and commits the states of one replica."""

    def __init__(self, context: RoundContext, log: ResultLog) -> None:
        self._context, self._state, self._log = context, context.state, log
        self._built: dict[bytes, LoggedResult] = {}
        self._orders: dict[bytes, MergeOrder] = {}
        self._staged: dict[bytes, bytes] = {}  # names under which results are on disk already, by state
        self._fetched: Fetched | None = None
        self._lock = trio.Lock()
        self._scope = trio.CancelScope()
        self._builders = trio.CapacityLimiter(THREADS)
        self._ahead: _Ahead | None = None

    @property
    def holds(self) -> list[bytes]:
        """Hashes of the states that are here or can be built."""
        fetched = [self._fetched.tree.root] if self._fetched is not None else []
        return [self._state.tree.root, *self._built, *fetched]

    def result_of(self, state_hash: bytes) -> LoggedResult | None:
        """Return the encoded results that lead to a state from the committed one."""
        return self._built.get(state_hash)

    def order_of(self, state_hash: bytes) -> MergeOrder | None:
        """Return what was merged on the way to a state that was built here."""
        return self._orders.get(state_hash)

    def fetched(self, state_hash: bytes) -> Fetched | None:
        """Return the state with that hash, if it was fetched whole."""
        return self._fetched if self._fetched is not None and self._fetched.tree.root == state_hash else None

    def part(self, key: bytes, index: int) -> memoryview | None:
        """Return the result of a slice of an exchange that has led to a state here; after a restart, one from disk."""
        for result in self._built.values():
            if key and result.key == key and index < len(result.parts):
                return result.parts[index]
        return None

    def offer(self, result: LoggedResult) -> None:
        """Take results that lead to a state from the committed one, read from disk."""
        self._built[result.leads_to] = result

    def offer_fetched(self, fetched: Fetched) -> None:
        """Take a state that was fetched whole; it waits until it is committed."""
        self._fetched = fetched

    async def leads_on(self, result: LoggedResult) -> bool:
        """Build what results on disk lead to from the committed state; return whether it has the hash that they name.
        Raises `ProtocolViolation` if they do not decode."""
        return await self._rebuild(result) == result.leads_to

    async def advance(self, result: LoggedResult) -> None:
        """Make the state that results lead to the committed one. Raises `ProtocolViolation` if it is another one."""
        if not await self.leads_on(result):
            raise ProtocolViolation("results on disk lead to another state than they name")
        self._state.commit(result.leads_to)

    # -- building ------------------------------------------------------------------------------------------------------

    async def build_ahead(self, exchange: SliceExchange) -> None:
        """Build what the owners' results lead to while they arrive, before it is known which of them count."""
        with self._turn():
            async with self._lock:
                order = exchange.order
                if order.before.state_hash != self._state.tree.root:
                    return  # the round was over before the room was free
                ahead = await self._begin(order)
                async with trio.open_nursery() as nursery:
                    for index in order.indices:
                        nursery.start_soon(self._apply_first, ahead, exchange, index)

    async def _begin(self, order: MergeOrder) -> _Ahead:
        self._ahead = None
        await trio.to_thread.run_sync(self._state.begin, order.round_info, order.coding)
        self._ahead = _Ahead(order)
        return self._ahead

    async def _apply_first(self, ahead: _Ahead, exchange: SliceExchange, index: int) -> None:
        name, data = await exchange.any_result(index)
        try:
            await trio.to_thread.run_sync(self._apply, exchange.order, index, data, limiter=self._builders)
        except ProtocolViolation as error:
            self._context.events.emit("peer_penalized", peer=exchange.owners[index], reason=str(error))
            return
        ahead.applied[index] = name

    async def build(self, exchange: SliceExchange, results: Sequence[bytes], holders: Sequence[str]) -> bytes | None:
        """Build the state that the results with these hashes lead to; return its hash, or None if they cannot be had
        or do not decode."""
        order = exchange.order
        state_hash: bytes | None = None
        with self._turn():  # ends early if another builder wants the room
            async with self._lock:
                if order.before.state_hash != self._state.tree.root:
                    return None
                ahead = self._ahead
                if ahead is None or ahead.order.key != order.key:
                    ahead = await self._begin(order)
                parts: dict[int, memoryview] = {}
                failed: list[str] = []

                async def one(index: int) -> None:
                    try:
                        parts[index] = await exchange.result(index, results[index], holders)
                        if ahead.applied.get(index) != results[index]:
                            await trio.to_thread.run_sync(
                                self._apply, order, index, parts[index], limiter=self._builders
                            )
                            ahead.applied[index] = results[index]
                    except BarnraiseError as error:
                        failed.append(str(error))

                async with trio.open_nursery() as nursery:
                    for index in order.indices:
                        nursery.start_soon(one, index)
                if failed:
                    self._ahead = None
                    self._context.events.emit("build_failed", round=order.round_info.round, reason=failed[0])
                else:
                    encoded = [parts[index] for index in order.indices]
                    name = name_build(order.key, tuple(results))
                    state_hash = await self._hash_and_stage(order, name, encoded)
                    self._staged[state_hash] = name
                    self._remember(LoggedResult(order.before, state_hash, encoded, order.key))
                    self._orders[state_hash] = order
        return state_hash

    async def follow(self, before: Head, results: Mapping[int, memoryview], leads_to: bytes) -> bool:
        """Build the state after `before` from another peer's results; return whether it has that hash."""
        result = LoggedResult(before, leads_to, [results[index] for index in sorted(results)])
        with self._turn():
            async with self._lock:
                if await self._rebuild(result) == leads_to:
                    self._remember(result)
                    return True
        return False

    async def _rebuild(self, result: LoggedResult) -> bytes:
        """Build a state again from its results. Raises `ProtocolViolation` if they do not decode."""
        state, round_info = self._state, self._context.schedule.round_info(result.before)
        self._ahead = None
        coding = await trio.to_thread.run_sync(state.strategy.coding, round_info, state.tensors)
        await trio.to_thread.run_sync(state.begin, round_info, coding)
        if not result.parts:
            return await trio.to_thread.run_sync(state.hash_unchanged)
        if len(result.parts) != coding.count:
            raise ProtocolViolation("results have another number of slices than the round")
        for index, part in enumerate(result.parts):
            await trio.to_thread.run_sync(state.build, index, part)
        return await trio.to_thread.run_sync(state.hash_next)

    async def _hash_and_stage(self, order: MergeOrder, name: bytes, parts: Sequence[memoryview]) -> bytes:
        """Hash the next state. Meanwhile the results go to disk, since a vote for it waits for that."""
        state = self._state

        async def stage() -> None:
            with suppress(ResourceError):  # `save` will try again, and tell
                await trio.to_thread.run_sync(self._log.stage, name, parts)

        async with trio.open_nursery() as nursery:
            if parts:
                nursery.start_soon(stage)
            return await trio.to_thread.run_sync(state.hash_next if order.indices else state.hash_unchanged)

    async def save(self, state_hash: bytes) -> None:
        """Put the results that lead to that state on disk; a state that was fetched whole is there. Raises
        ResourceError."""
        result, name = self._built.get(state_hash), self._staged.get(state_hash, state_hash)
        if result is not None and not await trio.to_thread.run_sync(self._log.has, state_hash):
            await trio.to_thread.run_sync(self._log.write, result, name)

    def _apply(self, order: MergeOrder, index: int, data: memoryview) -> None:
        order.coding.check_result(index, data, order.sent(index))
        self._state.build(index, data)

    def _remember(self, result: LoggedResult) -> None:
        self._built[result.leads_to] = result
        while len(self._built) > BUILT_MAX:
            oldest = next(iter(self._built))
            del self._built[oldest]
            self._orders.pop(oldest, None)
            self._staged.pop(oldest, None)

    # -- commit --------------------------------------------------------------------------------------------------------

    async def commit(self, head: Head, goal: bytes = b"") -> None:
        """Make the state of `head` the committed one. `goal`: the hash of the state that is to be committed next, where
        the node has gone there already; if it was fetched, it stays.

        Raises RuntimeError if the state is not here, which the agreement excludes."""
        self._scope.cancel()
        async with self._lock:
            result = self._built.get(head.state_hash)
            if head.state_hash != self._state.tree.root:
                await self._make_current(head, result)
            self._built, self._orders, self._staged = {}, {}, {}
            self._fetched, self._ahead = self.fetched(goal) if goal != head.state_hash else None, None

    async def _make_current(self, head: Head, result: LoggedResult | None) -> None:
        fetched = self.fetched(head.state_hash)
        if self._state.next_hash == head.state_hash:
            self._state.commit(head.state_hash)
        elif fetched is not None:
            await trio.to_thread.run_sync(self._state.replace, fetched.tensors, fetched.tree)
        elif result is not None:
            await self.advance(result)
        else:
            await self._advance_by_log(head)

    async def _advance_by_log(self, head: Head) -> None:
        """Go to a state that was found on disk at the start, or that was voted for and has made room for others."""
        logged = await trio.to_thread.run_sync(self._log.load)
        for result in path_between(logged, self._state.tree.root, head.state_hash):
            await self.advance(result)
        if self._state.tree.root != head.state_hash:
            raise RuntimeError("the agreement has committed a state that is not here")

    def _turn(self) -> trio.CancelScope:
        """Return the scope of a builder of the next state. The last one to come has the room: the one before is
        cancelled, also while it waits for the lock, since what it would wait for then may never come. What was applied
        stays, for a builder of the same exchange."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        return self._scope


class _Ahead:
    """The slices of the next state that were applied, by the hash of their result."""

    def __init__(self, order: MergeOrder) -> None:
        self.order = order
        self.applied: dict[int, bytes] = {}
