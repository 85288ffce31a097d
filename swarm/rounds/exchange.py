"""Butterfly all-reduce: contributors send each slice to its owner; the owner merges it and sends the result to all.

    own update --encode--> slice i --> owner of i: wait for all, check, merge in fixed order, encode ONCE
                                          |--> result i --> every contributor: decode, build the next state

All contributors, the owner included, decode the same result bytes, so their next states are bit-identical. All slices
move at once: sending, merging, sending back and applying overlap. Slices received or delivered are kept over the
attempts of a round, so that the loss of a member costs only the slices it owned. If there is nothing to merge, nothing
is sent and the next state is the present one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isclose
from typing import Any, Final

import torch
import trio
from blake3 import blake3

from optim.strategies.interface import Coding, RoundInfo, Sent
from peer import faults
from peer.errors import NetworkError, ProtocolViolation, RemoteError, RoundError
from peer.identity import Signed
from peer.net.rpc import Method
from swarm.protocol.messages import CONTRIBUTION, FETCH_RESULT, RESULT, Done, SliceOf
from swarm.protocol.plan import Contribution, Roster, WorkPlan
from swarm.rounds.context import RoundContext

SENDS_PER_PEER: Final = 2  # keeps a link busy while a call waits for its answer, and leaves room for other peers
THREADS: Final = max(1, (os.cpu_count() or 2) // 2)  # per kind of work: two threads on one core compete for its cache
RETRY_PAUSE_S: Final = 0.25
REFUSALS_MAX: Final = 8


@dataclass(frozen=True)
class MergePlan:
    """The checked contributions of one attempt, and how they are merged."""

    round_info: RoundInfo
    plan: WorkPlan
    """The plan of the roster; a later attempt may have replaced the peer's own."""
    signed_plan: Signed
    """`plan` as its leader signed it."""
    roster: Roster
    contributors: Sequence[Contribution]
    """In the roster's order."""
    weights: Sequence[float]
    """The weight of each contributor in the mean; 0 if the gate left it out."""
    coding: Coding

    def owner(self, index: int) -> str:
        """Return the owner (peer id) of a slice."""
        return self.contributors[self.roster.owners[index]].member.peer

    def merged(self) -> list[Contribution]:
        """Return the contributions that passed the gate."""
        return [c for c, weight in zip(self.contributors, self.weights, strict=True) if weight > 0]

    def sent(self, index: int) -> list[Sent]:
        """Return what went into one slice's result, in order."""
        return [
            Sent(c.hashes[index], c.sqnorms[index], weight)
            for c, weight in zip(self.contributors, self.weights, strict=True)
            if weight > 0
        ]


def as_bytes(encoded: torch.Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor without a copy."""
    array: Any = encoded.numpy()
    return memoryview(array)


class BuildLock:
    """The right to build the next outer state, for one builder: all builders write to the same buffers."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.released = trio.Event()
        """Set when the builder writes nothing any more."""
        self.cancelled = False
        """Whether another builder has asked for the buffers."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Build inside the block; `cancel` leaves it early."""
        try:
            with self.scope:
                yield
        finally:
            self.released.set()

    async def cancel(self) -> None:
        """Cancel the builder; return when it writes nothing any more."""
        self.cancelled = True
        self.scope.cancel()
        await self.released.wait()


class ButterflyAllReduce:
    """One attempt's exchange at one of its contributors.

    `mine` are this peer's encoded slices. `received` holds those of others by (index, peer), each with its blake3 hash;
    `delivered` the (index, owner) of each own slice that has arrived. Both outlive the attempt.

    `run` delivers slices and results until all contributors have theirs, or it is cancelled.
    """

    def __init__(
        self,
        context: RoundContext,
        merge: MergePlan,
        mine: Sequence[memoryview],
        received: dict[tuple[int, str], tuple[bytes, memoryview]],
        delivered: set[tuple[int, str]],
        call_timeout_s: float,
    ) -> None:
        self.merge = merge
        self.key = merge.roster.hash
        self.results: dict[int, memoryview] = {}
        self.built = trio.Event()
        """Set once the next state is complete here; its hash is `state_hash`."""
        self.state_hash = b""
        self._me, self._mine = context.me.peer, mine
        self._state, self._rpc, self._events = context.state, context.host.rpc, context.events
        self._received, self._delivered = received, delivered
        self._call_timeout_s = call_timeout_s
        self._peers = [c.member.peer for c in merge.contributors]
        self._merged = merge.merged()
        self._indices = range(merge.coding.count if self._merged else 0)
        self._owned = [i for i in self._indices if merge.owner(i) == self._me]
        self._arrived = {i: trio.Event() for i in self._owned}  # all contributions to slice i
        self._came = {i: trio.Event() for i in self._indices}  # the result of slice i
        self._links = {peer: trio.CapacityLimiter(SENDS_PER_PEER) for peer in self._peers}
        self._mergers = trio.CapacityLimiter(THREADS)  # not shared with the builders: others wait for merges
        self._builders = trio.CapacityLimiter(THREADS)

    async def run(self) -> None:
        """Exchange slices and results, and build the next state."""
        faults.reach("before_send", self.merge.round_info.round)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._build_all)
            for peer in self._clockwise():
                nursery.start_soon(self._send_part, peer)
            for index in self._owned:
                self._check_arrived(index)
                nursery.start_soon(self._own, index, nursery)

    async def fetch_from(self, holder: str) -> None:
        """Fetch the results from a peer that has them all, and build the next state. Use it in place of `run`."""
        await trio.to_thread.run_sync(self._state.begin, self.merge.round_info, self.merge.coding)
        for index in self._indices:
            reply = await self._rpc.call(
                holder, FETCH_RESULT, SliceOf(self.key, index), timeout_s=self._call_timeout_s, bulk=True
            )
            self._take_checked(index, reply.payload)
            await trio.to_thread.run_sync(self._apply, index)  # a result that does not decode is the holder's fault
        await self._hash_result()

    async def rebuild(self) -> None:
        """Build the next state again from the results, after another attempt has overwritten it."""
        await self._build_all()

    def expect_contribution(self, index: int, peer: str, size_bytes: int) -> None:
        """Raise unless a contributor's slice of that size is still wanted: no memory is given to any other."""
        body = self._contributor(index, peer)
        if size_bytes != self.merge.coding.message_bytes(index):
            raise ProtocolViolation(f"a slice of {size_bytes} bytes has the wrong size")
        if self._has(index, body):
            raise RoundError("that slice is here already: send the next")

    def take_contribution(self, index: int, peer: str, data: memoryview) -> None:
        """Keep a contributor's slice. Raise `ProtocolViolation` unless it is what the peer committed to."""
        body = self._contributor(index, peer)
        if self._has(index, body):
            return  # sent again after a lost answer
        if blake3(data).digest() != body.hashes[index]:
            raise ProtocolViolation("a slice differs from the hash its sender committed to")
        sqnorm = self.merge.coding.message_sqnorm(index, data)
        if not isclose(sqnorm, body.sqnorms[index], rel_tol=1e-6):  # also refuses NaN
            raise ProtocolViolation("a slice has another norm than its sender committed to")
        self._received[index, peer] = body.hashes[index], data
        self._check_arrived(index)

    def expect_result(self, index: int, peer: str, size_bytes: int) -> None:
        """Raise unless a merged slice of that size, from its owner, is still wanted."""
        self._check_result(index, peer, size_bytes)
        if index in self.results:
            raise RoundError("that result is here already: send the next")

    def take_result(self, index: int, peer: str, data: memoryview) -> None:
        """Keep a merged slice. Raise `ProtocolViolation` unless it comes from its owner."""
        self._check_result(index, peer, len(data))
        self._take_checked(index, data)

    def missing(self) -> tuple[str, ...]:
        """Return the contributors whose slices this peer, as an owner, still waits for."""
        late = {
            body.member.peer
            for index in self._owned
            for body in self._merged
            if index not in self.results and not self._has(index, body)
        }
        return tuple(sorted(late))

    def silent(self) -> tuple[str, ...]:
        """Return the other owners whose results this peer still waits for."""
        return tuple(sorted({self.merge.owner(i) for i in self._indices if i not in self.results} - {self._me}))

    def _contributor(self, index: int, peer: str) -> Contribution:
        """Return the contribution of a peer that sends this owner one of its slices."""
        body = next((c for c in self._merged if c.member.peer == peer), None)
        if body is None or index not in self._arrived:
            raise ProtocolViolation("a slice was sent that this exchange does not expect from that peer")
        return body

    def _check_result(self, index: int, peer: str, size_bytes: int) -> None:
        if index not in self._came or self.merge.owner(index) != peer:
            raise ProtocolViolation("a result was sent by a peer that does not own the slice")
        if size_bytes != self.merge.coding.result_bytes(index, len(self._merged)):
            raise ProtocolViolation("a result has the wrong size")

    def _clockwise(self) -> list[str]:
        """Return the other contributors, starting after this peer, so that contributors start with different owners."""
        own = self._peers.index(self._me)
        return self._peers[own + 1 :] + self._peers[:own]

    def _has(self, index: int, body: Contribution) -> bool:
        """Return whether the slice committed to in this attempt is here; an earlier attempt may have left another."""
        peer = body.member.peer
        return peer == self._me or self._received.get((index, peer), (b"",))[0] == body.hashes[index]

    def _check_arrived(self, index: int) -> None:
        if all(self._has(index, body) for body in self._merged):
            self._arrived[index].set()

    def _take_checked(self, index: int, data: memoryview) -> None:
        if len(data) != self.merge.coding.result_bytes(index, len(self._merged)):
            raise ProtocolViolation("a result has the wrong size")
        if index not in self.results:
            self.results[index] = data
            self._came[index].set()

    async def _send_part(self, owner: str) -> None:
        if all(body.member.peer != self._me for body in self._merged):
            return  # this peer's update is not merged
        left = deque(
            index
            for index in self._indices
            if self.merge.owner(index) == owner and (index, owner) not in self._delivered
        )
        async with trio.open_nursery() as nursery:
            for _ in range(SENDS_PER_PEER):
                nursery.start_soon(self._send_slices, left, owner)

    async def _send_slices(self, left: deque[int], owner: str) -> None:
        """Send slices in the same order as every contributor, so that the owner can merge the first ones early."""
        while left:
            index = left.popleft()
            if await self._send(owner, CONTRIBUTION, SliceOf(self.key, index), self._mine[index]):
                self._delivered.add((index, owner))
            faults.reach("during_exchange", self.merge.round_info.round)

    async def _own(self, index: int, nursery: trio.Nursery) -> None:
        """Merge one slice and send the result to all contributors."""
        await self._arrived[index].wait()
        try:
            result = await trio.to_thread.run_sync(self._merge, index, limiter=self._mergers)
        except ProtocolViolation as error:  # the mean does not fit the codec: without a result the attempt times out
            self._events.emit("merge_failed", round=self.merge.round_info.round, reason=str(error))
            return
        self._take_checked(index, result)
        for peer in self._clockwise():
            nursery.start_soon(self._send, peer, RESULT, SliceOf(self.key, index), result)

    def _merge(self, index: int) -> memoryview:
        encoded = [
            self._mine[index] if peer == self._me else self._received[index, peer][1]
            for peer in (body.member.peer for body in self._merged)
        ]
        weights = [weight for weight in self.merge.weights if weight > 0]
        return as_bytes(self.merge.coding.merge(index, encoded, weights))

    async def _build_all(self) -> None:
        await trio.to_thread.run_sync(self._state.begin, self.merge.round_info, self.merge.coding)
        async with trio.open_nursery() as nursery:
            for index in self._indices:
                nursery.start_soon(self._build, index)
        await self._hash_result()

    async def _hash_result(self) -> None:
        hash_state = self._state.hash_next if self._merged else self._state.hash_unchanged
        self.state_hash = await trio.to_thread.run_sync(hash_state)
        self.built.set()

    async def _build(self, index: int) -> None:
        while True:
            await self._came[index].wait()
            try:
                await trio.to_thread.run_sync(self._apply, index, limiter=self._builders)
                return
            except ProtocolViolation as error:  # the owner sent an invalid result: wait for another
                owner = self.merge.owner(index)
                self._events.emit("peer_penalized", peer=owner, reason=str(error))
                del self.results[index]
                self._came[index] = trio.Event()

    def _apply(self, index: int) -> None:
        """Build one slice of the next state. Raise `ProtocolViolation` if the result cannot be the mean of what the
        contributors committed to."""
        self.merge.coding.check_result(index, self.results[index], self.merge.sent(index))
        self._state.build(index, self.results[index])

    async def _send(self, peer: str, method: Method[SliceOf, Done], message: SliceOf, data: memoryview) -> bool:
        """Send one slice until the peer takes it (True) or refuses it (False)."""
        async with self._links[peer]:
            refusals = 0
            while refusals < REFUSALS_MAX:
                try:
                    await self._rpc.call(peer, method, message, data, timeout_s=self._call_timeout_s, bulk=True)
                    return True
                except RemoteError as error:
                    if error.code != "RoundDiscarded":  # the peer may not have begun this exchange yet
                        return False
                    refusals += 1
                except ProtocolViolation:
                    return False
                except NetworkError:
                    pass
                await trio.sleep(RETRY_PAUSE_S)
            return False
