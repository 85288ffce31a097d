"""Butterfly all-reduce: contributors send each slice to its owner, which merges it and sends the result to all.

    own update --encode--> slice i --> owner of i: wait for all, check, merge in fixed order, encode ONCE
                                          |--> result i --> every voter: decode, build the next state

If a contributor cannot reach an owner that others reach, one of these forwards its slices.

A peer sends its update as its link carries it (`send_window`), results as soon as they are merged. Slices received or
delivered are kept over the attempts of a round, so that the loss of a member costs only the slices it owned. The
owners' signatures decide, through the agreement, which results count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
import trio
from blake3 import blake3

from optim.bundles import bundle_hash
from peer import faults
from peer.catalogue.rounds import MergeFailed
from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RemoteError, RoundDiscarded, RoundError
from peer.machine import usable_cores
from peer.net.method import Empty
from peer.net.rpc import Method
from swarm.protocol.agreement import events
from swarm.protocol.messages import CONTRIBUTION, FETCH_RESULT, RELAY, RESULT, SliceOf
from swarm.protocol.plan import Contribution
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.merge_order import MergeOrder
from swarm.rounds.exchange.round_slices import FalseSlice, RoundSlices, Spool, measure, off_the_loop
from swarm.rounds.exchange.send_window import SENDS_PER_OWNER

THREADS: Final = max(1, usable_cores() // 2)  # two threads on one core compete for its cache
RETRY_PAUSE_S: Final = 0.25
RETRY_PAUSE_MAX_S: Final = 1.0  # a dead peer is tried until the exchange ends
REFUSALS_MAX: Final = 8


class SliceExchange:
    """One exchange at one peer. Calls may take `timeout_s`; events go to `feed`."""

    def __init__(
        self,
        context: RoundContext,
        order: MergeOrder,
        mine: Sequence[memoryview],
        slices: RoundSlices,
        timeout_s: float,
        feed: Callable[[events.Event], None],
        takes_part: bool = True,
    ) -> None:
        """`mine`: this peer's encoded slices, as it has committed to them; none if they went with an earlier process.
        Without `takes_part` the results alone are wanted."""
        self.order = order
        self.owners: Sequence[str] = order.owners if takes_part else ()
        self.results: dict[int, tuple[bytes, memoryview]] = {}
        """The result of each slice so far, with its hash."""
        self.scope = trio.CancelScope()
        self.began_at = trio.current_time()
        self.is_built = False
        """Whether the next state was built from its results."""
        self._context, self._rpc, self._me = context, context.host.rpc, context.me.peer
        self._mine, self._slices, self._delivered = mine, slices, slices.delivered
        self._bundles = order.bundles
        self.timeout_s, self._feed = timeout_s, feed
        self._merged = order.merged
        own = order.parts.get(context.me, ()) if takes_part else ()
        self._owned = [index for index in own if index in order.indices]
        others = dict.fromkeys([*order.peers, *(member.peer for member in order.before.members)])
        others.pop(self._me, None)
        self._others = _clockwise(list(others), self._me)
        self._arrived = {index: trio.Event() for index in self._owned}
        self._came = {index: trio.Event() for index in order.indices}
        self._links = {peer: trio.CapacityLimiter(SENDS_PER_OWNER) for peer in {*self._others, *self.owners}}
        self._mergers = trio.CapacityLimiter(THREADS)

    # -- what this peer does -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send slices, merge, and send results until all is delivered or `scope` is cancelled."""
        faults.reach("before_send", self.order.round_info.round)
        with self.scope, self._context.snapshots.stepping_back():  # joiners get less of the link meanwhile
            async with trio.open_nursery() as nursery:
                own = next((body for body in self._merged if body.member == self._context.me), None)
                if self._mine and own is not None:
                    nursery.start_soon(self._send_update, own)
                if not self._owned:
                    nursery.start_soon(self._merge_nothing)
                for index in self._owned:
                    self._check_arrived(index)
                    nursery.start_soon(self._own, index, nursery)
                nursery.start_soon(self._report_missing)
                await self._all_results()

    async def _merge_nothing(self) -> None:
        """Tell the node of the slices that it owns although nothing is merged: their result is empty."""
        if not self.order.indices:
            for bundle, name in enumerate(self.order.empty_results if self.owners else ()):
                if self.owners[self._bundles.indices(bundle).start] == self._me:
                    self._feed(events.SliceResult(self.order.key, bundle, name))
        await trio.lowlevel.checkpoint()

    async def _all_results(self) -> None:
        for came in list(self._came.values()):
            await came.wait()

    async def _report_missing(self) -> None:
        """Tell the node, once the exchange takes long, for whom this peer still waits."""
        await trio.sleep(self.timeout_s / 2)
        missing, silent = self._missing(), self._silent()
        if missing or silent:
            self._feed(events.Missing(self.order.key, missing, silent))

    async def _send_update(self, own: Contribution) -> None:
        parts = {owner: list[int]() for owner in _clockwise(sorted(set(self.owners) - {self._me}), self._me)}
        for index in self.order.indices:
            if (owner := self.owners[index]) != self._me and (index, owner) not in self._delivered:
                parts[owner].append(index)
        sizes = [len(data) for data in self._mine]
        await self._context.links.window.send_all(parts, sizes, partial(self._send_own, own))

    async def _send_own(self, own: Contribution, owner: str, index: int) -> bool:
        named = SliceOf(self.order.key, index, hashes=self.list_of(index, own))
        taken = await self._send(owner, CONTRIBUTION, named, self._mine[index])
        if taken:
            self._delivered.add((index, owner))
        faults.reach("during_exchange", self.order.round_info.round)
        return taken

    async def _relay(self, owner: str, named: SliceOf, data: memoryview) -> bool:
        """Have another peer forward one slice, if this one cannot reach the owner. Return whether it has arrived."""
        suspects = self._context.host.suspects
        for peer in self._others if owner in suspects else ():
            if peer != owner and peer not in suspects:
                try:
                    await self._rpc.call(peer, RELAY, named, data, timeout_s=self.timeout_s, bulk=True)
                    return True
                except BarnraiseError:
                    continue
        return False

    async def _own(self, index: int, nursery: trio.Nursery) -> None:
        """Merge one slice, and send the result to all that need it."""
        await self._arrived[index].wait()
        try:
            result, name = await trio.to_thread.run_sync(self._merge, index, limiter=self._mergers)
        except ProtocolViolation as error:  # the mean does not fit the codec: without a result the attempt times out
            self._context.events.emit(MergeFailed(round=self.order.round_info.round, reason=str(error)))
            return
        self._keep(index, name, result)
        bundle = self._bundles.of(index)
        if (whole := self._name(bundle)) is not None:
            self._feed(events.SliceResult(self.order.key, bundle, whole))
        for peer in self._others:
            nursery.start_soon(self._send, peer, RESULT, SliceOf(self.order.key, index), result)

    def _merge(self, index: int) -> tuple[memoryview, bytes]:
        encoded = [data for body in self._merged if (data := self.input_of(index, body)) is not None]
        result = self.order.merge(index, encoded)
        return result, blake3(result).digest()

    def input_of(self, index: int, body: Contribution) -> memoryview | None:
        """Return a contributor's slice, if this peer has it."""
        if not self._has(index, body):
            return None
        peer = body.member.peer
        return self._mine[index] if peer == self._me else self._slices.received[index, peer].data

    def list_of(self, index: int, body: Contribution) -> tuple[bytes, ...]:
        """Return the hashes that go with a contributor's slice."""
        return self._slices.list_of(self._bundles, index, body)

    def is_committed(self, index: int, body: Contribution, hash: bytes, listed: tuple[bytes, ...]) -> bool:
        """Return whether a contributor has committed to a slice of that hash; `listed`: those that came with it."""
        with suppress(ProtocolViolation):
            self._slices.learn(self._bundles, index, body, listed)
        return hash == self._slices.hash_of(self._bundles, index, body)

    # -- results -------------------------------------------------------------------------------------------------------

    async def any_result(self, bundle: int) -> tuple[bytes, list[memoryview]]:
        """Wait for the results of a bundle's slices, whichever came first from its owner. Return their hash."""
        indices = self._bundles.indices(bundle)
        for index in indices:
            await self._came[index].wait()
        return bundle_hash([self.results[i][0] for i in indices]), [self.results[i][1] for i in indices]

    async def result(self, bundle: int, name: bytes, holders: Sequence[str]) -> list[memoryview]:
        """Return the results of a bundle's slices with that hash: what their owner has sent, else what a holder has.
        Raises `NetworkError` if none has it."""
        indices = self._bundles.indices(bundle)
        owner = self.owners[indices.start] if self.owners else ""
        with trio.move_on_after(self.timeout_s / 2):
            for index in indices:
                while index not in self.results and owner not in self._context.host.suspects | {""}:
                    with trio.move_on_after(RETRY_PAUSE_S):
                        await self._came[index].wait()
        for holder in dict.fromkeys([owner, *holders]):
            if self._name(bundle) == name:
                break
            if holder and holder != self._me and holder not in self._context.host.suspects:
                await self._fetch(bundle, name, holder)
        if self._name(bundle) != name:
            raise NetworkError(f"no peer has the result of slice {indices.start}")
        return [self.results[index][1] for index in indices]

    def _name(self, bundle: int) -> bytes | None:
        """Return the hash of a bundle's results, once all have arrived."""
        found = [self.results.get(index) for index in self._bundles.indices(bundle)]
        hashes = [result[0] for result in found if result is not None]
        return bundle_hash(hashes) if len(hashes) == len(found) else None

    async def _fetch(self, bundle: int, name: bytes, holder: str) -> None:
        """Fetch the results that are not here; where those that are have another hash with them, all."""
        indices = self._bundles.indices(bundle)
        here = {index: self.results[index] for index in indices if index in self.results}
        for wanted in ([index for index in indices if index not in here], list(indices)):
            for index in wanted:
                data = await self._fetch_slice(index, holder)
                if data is None:
                    return
                here[index] = await off_the_loop(_hash, data), data
            if bundle_hash([here[index][0] for index in indices]) == name:
                for index in indices:
                    self._keep(index, *here[index])
            if len(wanted) == len(indices) or self._name(bundle) == name:
                return

    async def _fetch_slice(self, index: int, holder: str) -> memoryview | None:
        try:
            call = SliceOf(self.order.key, index)
            reply = await self._rpc.call(holder, FETCH_RESULT, call, timeout_s=self.timeout_s, bulk=True)
        except BarnraiseError:
            return None
        fits = len(reply.payload) == self.order.coding.result_bytes(index, len(self._merged))
        return reply.payload if fits else None

    def _keep(self, index: int, name: bytes, result: memoryview) -> None:
        self.results[index] = name, result
        self._came[index].set()

    async def put_away(self, results: Sequence[memoryview], spool: Spool) -> None:
        """Hold what a commit was merged from in a file, and its results as they are given: members that are late ask
        for them, and audits."""
        self.results = {index: (name, results[index]) for index, (name, _) in self.results.items()}
        self._mine = await self._slices.put_away(self._mine, spool)

    # -- what others send ----------------------------------------------------------------------------------------------

    def expect_contribution(self, named: SliceOf, sender: str, size_bytes: int) -> None:
        """Raise unless a contributor's slice of that size is still wanted: no memory is given to any other."""
        body = self._contributor(named.index, named.contributor or sender)
        self._check_header(named, body, size_bytes)
        if self._has(named.index, body):
            raise RoundError("that slice has arrived: send the next")
        self._context.links.receiving(sender, named.flows)

    async def take_contribution(self, named: SliceOf, sender: str, data: memoryview) -> None:
        """Keep a contributor's slice. Raise `ProtocolViolation` unless it is what the contributor committed to; where
        the contributor itself has committed to a false one, a peer that passed it on is not to blame."""
        index, peer = named.index, named.contributor or sender
        body = self._contributor(index, peer)
        if self._has(index, body):
            return  # sent again after a lost answer
        found = await off_the_loop(partial(measure, self.order.coding, index), data)
        try:
            self._slices.take(self._bundles, index, body, data, found)
        except FalseSlice as error:
            if peer == sender:
                raise
            self._rpc.server.penalize(peer, str(error))
            raise RoundDiscarded("that contributor has committed to a false slice") from error
        self._check_arrived(index)

    def expect_relay(self, named: SliceOf, sender: str, size_bytes: int) -> None:
        """Raise unless a contributor's slice of that size is one that this peer may pass on to its owner."""
        self._check_header(named, self._relayed(named.index, sender), size_bytes)

    def _check_header(self, named: SliceOf, body: Contribution, size_bytes: int) -> None:
        self._slices.learn(self._bundles, named.index, body, named.hashes)
        if size_bytes != self.order.coding.message_bytes(named.index):
            raise ProtocolViolation(f"a slice of {size_bytes} bytes has the wrong size")

    async def pass_on(self, asked: SliceOf, peer: str, data: memoryview) -> None:
        """Send a contributor's slice to its owner. Raise `ProtocolViolation` unless it is what the peer committed to:
        the owner would take it for this peer's fault. Raises `NetworkError` if the owner is not reached from here."""
        index, body = asked.index, self._relayed(asked.index, peer)
        if await off_the_loop(_hash, data) != self._slices.hash_of(self._bundles, index, body):
            raise ProtocolViolation("a slice differs from the hash its sender committed to")
        owner, named = self.owners[index], SliceOf(self.order.key, index, peer, self.list_of(index, body))
        try:
            await self._rpc.call(owner, CONTRIBUTION, named, data, timeout_s=self.timeout_s, bulk=True)
        except ProtocolViolation as error:  # of the owner: not the contributor's fault
            raise NetworkError(f"{owner} gave no valid answer") from error

    def _relayed(self, index: int, peer: str) -> Contribution:
        """Return the contribution of a peer that asks this one to pass a slice on."""
        body = next((body for body in self._merged if body.member.peer == peer), None)
        if body is None or index not in self._came:
            raise ProtocolViolation("a slice is to be passed on that this exchange does not expect from that peer")
        if not self.owners or self.owners[index] == self._me:
            raise RoundDiscarded("this peer does not pass on slices of that exchange")
        return body

    def expect_result(self, named: SliceOf, peer: str, size_bytes: int) -> None:
        """Raise unless a merged slice of that size, from its owner, is still wanted."""
        index = named.index
        if index not in self._came or self.owners[index] != peer:
            raise ProtocolViolation("a result was sent by a peer that does not own the slice")
        if size_bytes != self.order.coding.result_bytes(index, len(self._merged)):
            raise ProtocolViolation("a result has the wrong size")
        if index in self.results:
            raise RoundError("that result has arrived: send the next")
        self._context.links.receiving(peer, named.flows)

    async def take_result(self, named: SliceOf, peer: str, data: memoryview) -> None:
        """Keep a merged slice from its owner."""
        name = await off_the_loop(_hash, data)
        if named.index not in self.results:
            self._keep(named.index, name, data)

    def _missing(self) -> tuple[str, ...]:
        """Return the contributors whose slices this peer, as an owner, still waits for."""
        late = {
            body.member.peer
            for index in self._owned
            for body in self._merged
            if index not in self.results and not self._has(index, body)
        }
        return tuple(sorted(late))

    def _silent(self) -> tuple[str, ...]:
        """Return the other owners whose results this peer still waits for."""
        return tuple(sorted({self.owners[i] for i in self.order.indices if i not in self.results} - {self._me}))

    def _contributor(self, index: int, peer: str) -> Contribution:
        """Return the contribution of a peer that sends this owner one of its slices."""
        body = next((body for body in self._merged if body.member.peer == peer), None)
        if body is not None and index in self._arrived:
            return body
        if body is not None and index < len(self.owners) and self.owners[index] == self._me:
            # it owns nothing: its sender cannot know of the new incarnation
            raise RoundDiscarded("that slice is for this peer's earlier incarnation, which has lost its disk")
        raise ProtocolViolation("a slice was sent that this exchange does not expect from that peer")

    def _has(self, index: int, body: Contribution) -> bool:
        """Return whether this peer has the slice committed to in this exchange."""
        peer = body.member.peer
        if peer == self._me:
            return bool(self._mine)
        return self._slices.has(self._bundles, index, body)

    def _check_arrived(self, index: int) -> None:
        if all(self._has(index, body) for body in self._merged):
            self._arrived[index].set()

    async def _send(self, peer: str, method: Method[SliceOf, Empty], message: SliceOf, data: memoryview) -> bool:
        """Send one slice until the peer takes it (True) or refuses it (False). A contribution whose owner is suspected
        goes by another peer."""
        async with self._links[peer]:
            refusals, pause_s = 0, RETRY_PAUSE_S
            while refusals < REFUSALS_MAX:
                if method is CONTRIBUTION and await self._relay(peer, message, data):
                    return True
                try:
                    with self._context.links.sending(peer, len(data), is_result=method is RESULT) as flows:
                        told = msgspec.structs.replace(message, flows=flows)
                        await self._rpc.call(peer, method, told, data, timeout_s=self.timeout_s, bulk=True)
                    return True
                except RemoteError as error:
                    if error.code != "RoundDiscarded":  # the peer may not have begun this exchange yet
                        return False
                    refusals += 1
                except ProtocolViolation:
                    return False
                except NetworkError:
                    pass
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)
            return False


def _clockwise(peers: list[str], me: str) -> list[str]:
    """Return the peers in an order that starts after this one, so that contributors start with different owners."""
    ordered = sorted(peers)
    after = sum(peer < me for peer in ordered)
    return ordered[after:] + ordered[:after]


def _hash(data: memoryview) -> bytes:
    return blake3(data).digest()
