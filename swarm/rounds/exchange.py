"""The butterfly: every contributor sends each slice to its owner, the owner merges and sends the result back to all.

    my delta --encode--> slice i --> owner of i: wait for all, check, merge in fixed order, encode ONCE
                                        |--> result i --> every contributor: decode, build the next state

Everybody, the owner included, decodes the same result bytes, so the next states are bit-identical. All slices move at
once: send, merge, send back and apply overlap. What was received or delivered is kept over attempts of the same round,
so that the loss of a member costs only the slices it owned. Where there is nothing to merge nothing is sent, and the
next state is the present one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, Final

import torch
import trio
from blake3 import blake3

from optim.strategies.interface import Coding, RoundInfo, Sent
from peer import faults
from peer.errors import NetworkError, ProtocolViolation, RemoteError
from peer.events import EventLog
from peer.identity import Signed
from peer.net.rpc import Method, Rpc
from swarm.protocol.messages import CONTRIBUTION, FETCH_RESULT, RESULT, Done, SliceOf
from swarm.protocol.plan import Contribution, Roster, WorkPlan
from swarm.state.outer_state import OuterState

SENDS_PER_PEER: Final = 2  # keeps a link busy while one call waits for its answer, without crowding out other peers
THREADS: Final = max(1, (os.cpu_count() or 2) // 2)  # for each kind of work: two on one core share its cache badly
RETRY_PAUSE_S: Final = 0.25
REFUSALS_MAX: Final = 8


@dataclass
class RoundSlices:
    """One round's slices, over all of its attempts. `received`: others', by (index, peer), each with its blake3 hash;
    `delivered`: (index, owner) pairs of mine that have arrived."""

    received: dict[tuple[int, str], tuple[bytes, memoryview]] = field(default_factory=dict)
    delivered: set[tuple[int, str]] = field(default_factory=set)


@dataclass(frozen=True)
class MergePlan:
    """What one attempt merges: the roster's contributors, in its order, with the weight of each in the mean (0: left
    out by the gate), as the `coding` of that `round_info` has it. `plan` is the work it completes, `signed_plan` that
    plan as its leader signed it: a later attempt may have replaced the peer's own."""

    round_info: RoundInfo
    plan: WorkPlan
    signed_plan: Signed
    roster: Roster
    contributors: Sequence[Contribution]
    weights: Sequence[float]
    coding: Coding

    def owner(self, index: int) -> str:
        return self.contributors[self.roster.owners[index]].member.peer

    def merged(self) -> list[Contribution]:
        """The contributors that passed the gate."""
        return [c for c, weight in zip(self.contributors, self.weights, strict=True) if weight > 0]

    def sent(self, index: int) -> list[Sent]:
        """What went into one slice's result, in order."""
        return [
            Sent(c.hashes[index], c.sqnorms[index], weight)
            for c, weight in zip(self.contributors, self.weights, strict=True)
            if weight > 0
        ]


def as_bytes(encoded: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor, not copied."""
    array: Any = encoded.numpy()
    return memoryview(array)


class ButterflyAllReduce:
    """One attempt's exchange, at one of its contributors.

    `built` is set once the next state is complete here, with `state_hash`; `run()` goes on delivering to the others
    until all have theirs or it is cancelled.
    """

    def __init__(
        self,
        me: str,
        merge: MergePlan,
        state: OuterState,
        mine: Sequence[memoryview],
        slices: RoundSlices,
        rpc: Rpc,
        call_timeout_s: float,
        events: EventLog,
    ) -> None:
        self.merge = merge
        self.key = merge.roster.hash
        self.results: dict[int, memoryview] = {}
        self.built = trio.Event()
        self.state_hash = b""
        self._me, self._mine = me, mine
        self._state, self._slices, self._rpc = state, slices, rpc
        self._call_timeout_s = call_timeout_s
        self._events = events
        self._peers = [c.member.peer for c in merge.contributors]
        self._merged = merge.merged()
        self._indices = range(merge.coding.count if self._merged else 0)
        self._owned = [i for i in self._indices if merge.owner(i) == me]
        self._arrived = {i: trio.Event() for i in self._owned}  # every contribution to slice i
        self._came = {i: trio.Event() for i in self._indices}  # the result of slice i
        self._links = {peer: trio.CapacityLimiter(SENDS_PER_PEER) for peer in self._peers}
        self._mergers = trio.CapacityLimiter(THREADS)  # of their own: others wait for a merge, nobody for our state
        self._builders = trio.CapacityLimiter(THREADS)

    async def run(self) -> None:
        faults.reach("before_send", self.merge.round_info.round)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._build_all)
            for peer in self._clockwise():
                nursery.start_soon(self._send_part, peer)
            for index in self._owned:
                self._check_arrived(index)
                nursery.start_soon(self._own, index, nursery)

    async def fetch_from(self, holder: str) -> None:
        """Instead of `run`: take the results from a peer that has them all, and build the next state."""
        await trio.to_thread.run_sync(self._state.begin, self.merge.round_info, self.merge.coding)
        for index in self._indices:
            reply = await self._rpc.call(
                holder, FETCH_RESULT, SliceOf(self.key, index), timeout_s=self._call_timeout_s, bulk=True
            )
            self._take_checked(index, reply.payload)
            await trio.to_thread.run_sync(self._apply, index)  # what does not decode is the holder's fault
        await self._seal()

    async def rebuild(self) -> None:
        """Build the next state again from results that are all here, after another attempt has overwritten it."""
        await self._build_all()

    def take_contribution(self, index: int, peer: str, data: memoryview) -> None:
        """Keep a contributor's slice if it is exactly what it committed to; `ProtocolViolation` otherwise."""
        body = next((c for c in self._merged if c.member.peer == peer), None)
        if body is None or index not in self._arrived:
            raise ProtocolViolation("a slice was sent that this exchange does not expect from that peer")
        if self._has(index, body):
            return  # a retry after a lost answer
        if blake3(data).digest() != body.hashes[index]:
            raise ProtocolViolation("a slice differs from the hash its sender committed to")
        sqnorm = self.merge.coding.message_sqnorm(index, data)
        if not isclose(sqnorm, body.sqnorms[index], rel_tol=1e-6):  # also refuses NaN
            raise ProtocolViolation("a slice has another norm than its sender committed to")
        self._slices.received[index, peer] = body.hashes[index], data
        self._check_arrived(index)

    def take_result(self, index: int, peer: str, data: memoryview) -> None:
        """Keep a merged slice sent by its owner; `ProtocolViolation` if it comes from anybody else."""
        if index not in self._came or self.merge.owner(index) != peer:
            raise ProtocolViolation("a result was sent by a peer that does not own the slice")
        self._take_checked(index, data)

    def missing(self) -> tuple[str, ...]:
        """Contributors whose slices I, as an owner, still wait for."""
        late = {
            body.member.peer
            for index in self._owned
            for body in self._merged
            if index not in self.results and not self._has(index, body)
        }
        return tuple(sorted(late))

    def silent(self) -> tuple[str, ...]:
        """Other owners whose results I still wait for."""
        return tuple(sorted({self.merge.owner(i) for i in self._indices if i not in self.results} - {self._me}))

    def _clockwise(self) -> list[str]:
        """The other contributors, starting after me: at any moment every owner hears from somebody else."""
        here = self._peers.index(self._me)
        return self._peers[here + 1 :] + self._peers[:here]

    def _has(self, index: int, body: Contribution) -> bool:
        """Whether the slice is here that it committed to in this attempt: another attempt may have been about
        others."""
        peer = body.member.peer
        return peer == self._me or self._slices.received.get((index, peer), (b"",))[0] == body.hashes[index]

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
            return  # nothing of mine is merged
        left = deque(
            index
            for index in self._indices
            if self.merge.owner(index) == owner and (index, owner) not in self._slices.delivered
        )
        async with trio.open_nursery() as nursery:
            for _ in range(SENDS_PER_PEER):
                nursery.start_soon(self._send_slices, left, owner)

    async def _send_slices(self, left: deque[int], owner: str) -> None:
        """In the same order at every contributor, so that the owner has the first slices complete early."""
        while left:
            index = left.popleft()
            if await self._send(owner, CONTRIBUTION, SliceOf(self.key, index), self._mine[index]):
                self._slices.delivered.add((index, owner))
            faults.reach("during_exchange", self.merge.round_info.round)

    async def _own(self, index: int, nursery: trio.Nursery) -> None:
        """Merge one slice and send the result to everybody."""
        await self._arrived[index].wait()
        try:
            result = await trio.to_thread.run_sync(self._merge, index, limiter=self._mergers)
        except ProtocolViolation as error:  # the mean does not fit the codec: no result, the attempt runs out of time
            self._events.emit("merge_failed", round=self.merge.round_info.round, reason=str(error))
            return
        self._take_checked(index, result)
        for peer in self._clockwise():
            nursery.start_soon(self._send, peer, RESULT, SliceOf(self.key, index), result)

    def _merge(self, index: int) -> memoryview:
        encoded = [
            self._mine[index] if peer == self._me else self._slices.received[index, peer][1]
            for peer in (body.member.peer for body in self._merged)
        ]
        weights = [weight for weight in self.merge.weights if weight > 0]
        return as_bytes(self.merge.coding.merge(index, encoded, weights))

    async def _build_all(self) -> None:
        await trio.to_thread.run_sync(self._state.begin, self.merge.round_info, self.merge.coding)
        async with trio.open_nursery() as nursery:
            for index in self._indices:
                nursery.start_soon(self._build, index)
        await self._seal()

    async def _seal(self) -> None:
        seal = self._state.seal if self._merged else self._state.seal_unchanged
        self.state_hash = await trio.to_thread.run_sync(seal)
        self.built.set()

    async def _build(self, index: int) -> None:
        while True:
            await self._came[index].wait()
            try:
                await trio.to_thread.run_sync(self._apply, index, limiter=self._builders)
                return
            except ProtocolViolation as error:  # its owner sent bytes that mean nothing: as if it had sent none
                owner = self.merge.owner(index)
                self._events.emit("peer_penalized", peer=owner, reason=str(error))
                del self.results[index]
                self._came[index] = trio.Event()

    def _apply(self, index: int) -> None:
        """Build one slice of the next state; `ProtocolViolation` if the result cannot be the mean of what was committed
        to."""
        self.merge.coding.check_result(index, self.results[index], self.merge.sent(index))
        self._state.build(index, self.results[index])

    async def _send(self, peer: str, method: Method[SliceOf, Done], message: SliceOf, data: memoryview) -> bool:
        """Deliver one slice, again and again until it is taken (True), refused (False), or the attempt is cancelled."""
        async with self._links[peer]:
            refusals = 0
            while refusals < REFUSALS_MAX:
                try:
                    await self._rpc.call(peer, method, message, data, timeout_s=self._call_timeout_s, bulk=True)
                    return True
                except RemoteError as error:
                    if error.code != "RoundDiscarded":  # that one: the order to exchange may not have reached it yet
                        return False
                    refusals += 1
                except ProtocolViolation:
                    return False
                except NetworkError:
                    pass
                await trio.sleep(RETRY_PAUSE_S)
            return False
