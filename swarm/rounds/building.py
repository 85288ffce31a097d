"""The next outer state of one replica: built from results, rebuilt where another build took its place, committed.

The outer state has room for one next state. A state counts as held while this replica has the encoded results that lead
to it: building it again takes one pass over the weights. A state that was fetched whole counts as held, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec
import trio

from optim.bundles import Bundles
from peer.catalogue.groups import PeerPenalized
from peer.errors import BarnraiseError, ProtocolViolation, ResourceError
from swarm.protocol.agreement.round.instance import name_build
from swarm.protocol.head import Head
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.merge_order import MergeOrder
from swarm.rounds.exchange.slice_exchange import THREADS, SliceExchange
from swarm.rounds.result_log import LoggedResult, ResultLog, path_between
from swarm.state.fetch import Fetched

CANDIDATES_MAX: Final = 4  # the accepted state and a candidate, and what a restart has found

ResultSource = Callable[[int], Awaitable[tuple[bytes, Sequence[memoryview]]]]
"""Returns the hash of a bundle's encoded results, and these, once they have arrived. Raises `NetworkError`."""


@dataclass(frozen=True)
class Candidate:
    """A state that the committed one may become: it was built, and had this hash."""

    result: LoggedResult
    name: bytes
    """Under which the results' bytes may be on disk already."""
    order: MergeOrder | None = None
    """The merged inputs; None where the results came from another peer or from disk."""


@dataclass
class _NextState:
    """How far the room for the next state is filled."""

    bundles: Bundles = field(default_factory=partial(Bundles, 0))
    filled: range = range(0)
    """The bundles that it has; none where nothing is merged."""
    order: MergeOrder | None = None
    """Of the exchange that it is built from; None if it is built from results whose hash is known."""
    applied: dict[int, bytes] = field(default_factory=dict)
    """The hash of the results that each bundle was built from."""
    candidate: Candidate | None = None
    """The next state, once all bundles were applied and its hash is known; None after a change."""


class StateBuilder:
    """Builds and commits the states of one replica."""

    def __init__(self, context: RoundContext, log: ResultLog) -> None:
        self._context, self._state, self._log = context, context.state, log
        self._candidates: dict[bytes, Candidate] = {}
        self._fetched: Fetched | None = None
        self._next = _NextState()
        self._lock = trio.Lock()
        self._scope = trio.CancelScope()
        self._builders = trio.CapacityLimiter(THREADS)

    @property
    def holds(self) -> list[bytes]:
        """Hashes of the states that this replica has or can build."""
        fetched = [self._fetched.tree.root] if self._fetched is not None else []
        return [self._state.tree.root, *self._candidates, *fetched]

    def candidate(self, state_hash: bytes) -> Candidate | None:
        """Return what leads from the committed state to that one."""
        return self._candidates.get(state_hash)

    def part(self, key: bytes, index: int) -> memoryview | None:
        """Return the result of a slice of an exchange that has led to a state here; after a restart, one from disk."""
        for candidate in self._candidates.values():
            result = candidate.result
            if key and result.key == key and index < len(result.parts):
                return result.parts[index]
        return None

    def offer_fetched(self, fetched: Fetched) -> None:
        """Take a state that was fetched whole; it waits until it is committed."""
        self._fetched = fetched

    # -- building ------------------------------------------------------------------------------------------------------

    async def build_ahead(self, exchange: SliceExchange) -> Candidate | None:
        """Build what the owners' results lead to as they arrive, before it is known which of them count. Return None if
        some do not decode, or another builder wants the room."""

        def failed(bundle: int, error: BarnraiseError) -> None:
            owner = exchange.owners[exchange.order.bundles.indices(bundle).start]
            self._context.events.emit(PeerPenalized(peer=owner, reason=str(error)))

        return await self._build(exchange, exchange.any_result, failed)

    async def build(
        self, exchange: SliceExchange, results: Sequence[bytes], holders: Sequence[str]
    ) -> Candidate | None:
        """Build what the results with these hashes lead to. Return None if they cannot be had or do not decode, or
        another builder wants the room."""

        async def named(bundle: int) -> tuple[bytes, Sequence[memoryview]]:
            return results[bundle], await exchange.result(bundle, results[bundle], holders)

        def failed(bundle: int, error: BarnraiseError) -> None:
            self._context.events.emit("build_failed", round=exchange.order.round_info.round, reason=str(error))

        return await self._build(exchange, named, failed)

    async def _build(
        self, exchange: SliceExchange, source: ResultSource, failed: Callable[[int, BarnraiseError], None]
    ) -> Candidate | None:
        """Build the next state from these results; `failed` receives the unusable ones."""
        order = exchange.order
        candidate: Candidate | None = None
        with self._turn():  # ends early if another builder wants the room
            async with self._lock:
                if order.before.state_hash != self._state.tree.root:  # the round is over
                    return None
                await self._begin(order)
                results = await self._apply(source, failed)
                if len(results) < len(order.filled):
                    return None
                with trio.CancelScope(shield=True):  # as short as a write: another builder may want this one
                    candidate = await self._name(order, results)
        return candidate

    async def _name(self, order: MergeOrder, results: Sequence[tuple[bytes, Sequence[memoryview]]]) -> Candidate:
        """Find out which state the next one is, all bundles of which were applied."""
        state = self._next
        if state.candidate is None:
            parts = [data for _, bundle in results for data in bundle]
            name = name_build(order.key, tuple(name for name, _ in results) or order.empty_results)
            state_hash = await self._hash_and_stage(name, parts)
            state.candidate = Candidate(LoggedResult(order.before, state_hash, parts, order.key), name, order)
        self._remember(state.candidate)
        return state.candidate

    async def follow(self, result: LoggedResult) -> bool:
        """Build what results of another peer, or on disk, lead to from the committed state. If it has the hash that
        they name, it is a candidate: return whether it is one. Raises `ProtocolViolation` if they do not decode."""
        if result.leads_to in self._candidates:
            return True
        with self._turn():
            async with self._lock:
                if await self._rebuild(result) == result.leads_to:
                    self._remember(Candidate(result, result.leads_to))
        return result.leads_to in self._candidates

    async def advance(self, result: LoggedResult) -> bool:
        """Make the state that results lead to the committed one, while no other builder has the room. Return False if
        it has another hash than they name. Raises `ProtocolViolation` if they do not decode."""
        if await self._rebuild(result) != result.leads_to:
            return False
        self._state.commit(result.leads_to)
        return True

    async def _begin(self, order: MergeOrder) -> None:
        """Begin the next state. Results already applied from the same exchange stay."""
        begun = self._next.order
        if begun is None or begun.key != order.key:
            self._next = _NextState()
            await trio.to_thread.run_sync(self._state.begin, order.round_info, order.coding)
            self._next = _NextState(order.bundles, order.filled, order)

    async def _rebuild(self, result: LoggedResult) -> bytes:
        """Build a state from its results; return the hash. Raises `ProtocolViolation` if they do not decode."""
        state, round_info = self._state, self._context.schedule.round_info(result.before)
        self._next = _NextState(Bundles(len(result.parts)), range(len(result.parts)))
        coding = await trio.to_thread.run_sync(state.strategy.coding, round_info, state.tensors)
        if len(result.parts) not in (0, coding.count):
            raise ProtocolViolation("results have another number of slices than the round")
        await trio.to_thread.run_sync(state.begin, round_info, coding)
        errors: list[BarnraiseError] = []

        async def logged(index: int) -> tuple[bytes, Sequence[memoryview]]:
            return b"", (result.parts[index],)

        await self._apply(logged, lambda bundle, error: errors.append(error))
        if errors:
            raise errors[0]
        return await self._hash()

    async def _apply(
        self, source: ResultSource, failed: Callable[[int, BarnraiseError], None]
    ) -> list[tuple[bytes, Sequence[memoryview]]]:
        """Apply all bundles of the next state, each as soon as its results arrive; `failed` receives the unusable ones.
        Return the applied results, in order."""
        state, found = self._next, dict[int, tuple[bytes, Sequence[memoryview]]]()

        async def one(bundle: int) -> None:
            try:
                name, results = await source(bundle)
                if state.applied.get(bundle) != name:
                    state.applied.pop(bundle, None)
                    state.candidate = None
                    await trio.to_thread.run_sync(self._apply_bundle, bundle, results, limiter=self._builders)
                    state.applied[bundle] = name
                found[bundle] = name, results
            except BarnraiseError as error:
                failed(bundle, error)

        async with trio.open_nursery() as nursery:
            for bundle in state.filled:
                nursery.start_soon(one, bundle)
        return [found[bundle] for bundle in sorted(found)]

    def _apply_bundle(self, bundle: int, results: Sequence[memoryview]) -> None:
        if self._next.order is not None:
            self._next.order.check(bundle, results)
        for index, data in zip(self._next.bundles.indices(bundle), results, strict=True):
            self._state.build(index, data)

    async def _hash(self) -> bytes:
        """Return the hash of the next state, all bundles of which were applied."""
        state = self._state
        return await trio.to_thread.run_sync(state.hash_next if self._next.filled else state.hash_unchanged)

    async def _hash_and_stage(self, name: bytes, parts: Sequence[memoryview]) -> bytes:
        """Hash the next state. Meanwhile the results go to disk, since a vote for it waits for that."""

        async def stage() -> None:
            with suppress(ResourceError):  # `save` will try again, and tell
                await trio.to_thread.run_sync(self._log.stage, name, parts)

        async with trio.open_nursery() as nursery:
            if parts:
                nursery.start_soon(stage)
            return await self._hash()

    async def save(self, state_hash: bytes) -> None:
        """Write the results that lead to that state to disk; a state fetched whole is on disk. Raises ResourceError."""
        candidate = self._candidates.get(state_hash)
        if candidate is None or self._log.has(state_hash):
            return
        written = replace(
            candidate, result=await trio.to_thread.run_sync(self._log.write, candidate.result, candidate.name)
        )
        if self._candidates.get(state_hash) is candidate:
            self._candidates[state_hash] = written
        if self._next.candidate is candidate:
            self._next.candidate = written

    async def prepare(self) -> None:
        """Make room on disk for the results of the next round, while nothing waits for it."""
        with suppress(ResourceError):  # `save` will try again, and tell
            await trio.to_thread.run_sync(self._log.prepare)

    async def spool(self, parts: Sequence[memoryview]) -> list[memoryview]:
        """Return the same bytes as they lie in a file without a name. Raises ResourceError."""
        return await trio.to_thread.run_sync(self._log.spool, parts)

    def _remember(self, candidate: Candidate) -> None:
        self._candidates[candidate.result.leads_to] = candidate
        while len(self._candidates) > CANDIDATES_MAX:
            del self._candidates[next(iter(self._candidates))]

    # -- commit --------------------------------------------------------------------------------------------------------

    async def commit(self, head: Head, goal: bytes = b"", parts: Sequence[memoryview] = ()) -> None:
        """Make the state of `head` the committed one, and serve it, and the encoded results that led there. `goal`: the
        hash of the state that is to be committed next, where the node has gone there already; if it was fetched, it
        stays.

        Raises RuntimeError if the state is not here, which the agreement excludes."""
        self._scope.cancel()
        async with self._lock:
            if head.state_hash != self._state.tree.root:
                await self._make_current(head.state_hash)
            self.publish(head, parts)
            self._candidates, self._next = {}, _NextState()
            if self._fetched is not None and (self._fetched.tree.root != goal or goal == head.state_hash):
                self._fetched = None

    def publish(self, head: Head, parts: Sequence[memoryview] = ()) -> None:
        """Serve the committed state, and the results that led there."""
        self._context.snapshots.publish(self._state.current, msgspec.msgpack.encode(head), parts)

    async def _make_current(self, state_hash: bytes) -> None:
        """Go to a state that was just built or was fetched whole; else by its results, which after a restart, or where
        it has made room for others, are on disk."""
        state, candidate = self._state, self._candidates.get(state_hash)
        if state.next_hash == state_hash:
            state.commit(state_hash)
            return
        if self._fetched is not None and self._fetched.tree.root == state_hash:
            state.replace(self._fetched.tensors, self._fetched.tree)
            return
        if candidate is not None:
            path = [candidate.result]
        else:
            path = path_between(await trio.to_thread.run_sync(self._log.load), state.tree.root, state_hash)
        for result in path:
            if not await self.advance(result):
                break
        if state.tree.root != state_hash:
            raise RuntimeError("the agreement has committed a state that is not here")

    def _turn(self) -> trio.CancelScope:
        """Return the scope of a builder of the next state. The newest one gets the room: the one before is cancelled,
        even while it waits for the lock, since the results it needs may then never come. Applied results stay, for a
        builder of the same exchange."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        return self._scope
