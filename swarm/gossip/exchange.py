"""The exchange of a pair's updates: each peer commits to its own, half by half, then fetches the partner's.

The proposer is ready when the exchange begins; the other may still be training. phi crosses at once in both directions,
delta as soon as both have theirs. A peer serves a half only to a partner that has committed to its own, and checks
every slice against the committed hash. A peer that got everything takes its step, even if its partner fails: peers of a
gossip run need not agree, so there is nothing to vote on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import trio
from blake3 import blake3

from peer.errors import BarnraiseError, ConnectionLost, DeadlineExceeded, ProtocolViolation, RoundDiscarded
from peer.net.host import Host
from swarm.gossip import messages as msg
from swarm.gossip.coding import Packed, PairMessage
from swarm.gossip.outgoing import OutgoingUpdate
from swarm.protocol.timeouts import AdaptiveTimeouts

CALLS: Final = 3  # hides the round trip of a fast link


@dataclass(frozen=True)
class Terms:
    """The terms that a proposal and its answer settled."""

    id: bytes
    partner: str
    proposed: bool
    """Whether this peer proposed."""
    rounds_apart: int
    """How many rounds the partner is ahead; negative if it is behind."""
    wait_s: float
    """How long the proposer waits for the partner's delta."""


class PairExchange:
    """One side of an exchange. When `over` is set, `theirs` is the partner's update, or `failure` says why there is
    none. `fetched` is set when the partner has fetched all of this peer's update."""

    def __init__(self, terms: Terms, outgoing: OutgoingUpdate, host: Host, timeouts: AdaptiveTimeouts) -> None:
        self.terms = terms
        self.outgoing = outgoing
        self.over = trio.Event()
        self.fetched = trio.Event()
        self.theirs: PairMessage | None = None
        self.failure: BarnraiseError | None = None
        self.bytes_down = 0
        self._host, self._timeouts = host, timeouts
        self._scope = trio.CancelScope()
        self._hashes: dict[msg.Half, tuple[bytes, ...]] = {}
        self._committed: dict[msg.Half, trio.Event] = {half: trio.Event() for half in msg.HALVES}
        self._owed = {(half, index) for half in msg.HALVES for index in range(outgoing.coding.count)}

    async def run(self) -> None:
        """Run until the partner's update has arrived, or the exchange fails."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._give_up_on_suspect)
                    try:
                        await self._exchange()
                    except BarnraiseError as error:
                        self.fail(error)
                    nursery.cancel_scope.cancel()
            if self.theirs is None and self.failure is None:
                self.failure = RoundDiscarded("the partner left the exchange")
        finally:
            self.over.set()

    async def leave(self) -> None:
        """End the exchange, and notify the partner if it can be reached."""
        self._scope.cancel()
        message = msg.Leave(self.terms.id)
        try:
            await self._host.rpc.call(self.terms.partner, msg.LEAVE, message, timeout_s=self._timeouts.answer_s)
        except BarnraiseError:
            return  # its own deadline ends it

    # -- the partner's calls -------------------------------------------------------------------------------------------

    async def take_commitment(self, commit: msg.Commit) -> Packed:
        """Take the partner's hashes of one half; return this peer's, once it has them."""
        self._note_hashes(commit.half, commit.hashes)
        return await self.outgoing.half(commit.half)

    async def serve_slice(self, half: msg.Half, index: int) -> memoryview:
        """Return a slice of this peer's, once the partner has committed to its own half."""
        if not 0 <= index < self.outgoing.coding.count:
            raise ProtocolViolation(f"there is no slice {index}")
        await self._committed[half].wait()
        packed = await self.outgoing.half(half)
        self._owed.discard((half, index))
        if not self._owed:
            self.fetched.set()
        return packed.slices[index]

    def left(self) -> None:
        """Note that the partner has ended the exchange."""
        self._scope.cancel()

    # -- this peer's part ----------------------------------------------------------------------------------------------

    async def _exchange(self) -> None:
        halves = [await self._take(half) for half in msg.HALVES]
        self.theirs = PairMessage(*halves)

    async def _take(self, half: msg.Half) -> Packed:
        wait_s = self.terms.wait_s if half == "delta" else 0.0
        if not self.terms.proposed and half == "delta":
            await self.outgoing.delta_ready.wait()  # this peer's own work, which has no deadline here
            wait_s = 0.0
        await self._agree(half, wait_s + self._timeouts.answer_s)
        began = trio.current_time()
        slices: dict[int, memoryview] = {}
        left = deque(range(self.outgoing.coding.count))
        limit_s = self._timeouts.exchange_s(self.outgoing.coding.total(half))
        with trio.move_on_after(limit_s) as timeout:
            async with trio.open_nursery() as nursery:
                for _ in range(min(CALLS, len(left))):
                    nursery.start_soon(self._fetch_slices, half, left, slices, limit_s)
        if timeout.cancelled_caught:
            raise DeadlineExceeded(f"the partner's {half} did not come within {limit_s:.1f} s")
        if self.failure is not None:  # all fetchers failed at once: none was left to be cancelled
            raise self.failure
        self._timeouts.note_exchange(trio.current_time() - began)
        return Packed(tuple(slices[i] for i in sorted(slices)), self._hashes[half])

    async def _agree(self, half: msg.Half, limit_s: float) -> None:
        """Exchange the hashes of one half; the proposer calls."""
        if self.terms.proposed:
            mine = await self.outgoing.half(half)
            message = msg.Commit(self.terms.id, half, mine.hashes)
            reply = await self._host.rpc.call(self.terms.partner, msg.COMMIT, message, timeout_s=limit_s)
            self._note_hashes(half, reply.body.hashes)
            return
        with trio.move_on_after(limit_s):
            await self._committed[half].wait()
            return
        raise DeadlineExceeded(f"the partner did not commit to its {half} within {limit_s:.1f} s")

    def _note_hashes(self, half: msg.Half, hashes: tuple[bytes, ...]) -> None:
        if len(hashes) != self.outgoing.coding.count or any(len(h) != blake3.digest_size for h in hashes):
            raise ProtocolViolation("a commitment has the wrong number of slices")
        if self._hashes.setdefault(half, hashes) != hashes:
            raise ProtocolViolation("a peer committed to two updates in one exchange")
        self._committed[half].set()

    async def _fetch_slices(
        self, half: msg.Half, left: deque[int], slices: dict[int, memoryview], limit_s: float
    ) -> None:
        try:
            while left:
                index = left.popleft()
                slices[index] = await self._fetch(half, index, limit_s)
        except BarnraiseError as error:
            self.fail(error)

    async def _fetch(self, half: msg.Half, index: int, limit_s: float) -> memoryview:
        message = msg.AskSlice(self.terms.id, half, index)
        reply = await self._host.rpc.call(self.terms.partner, msg.SLICE, message, timeout_s=limit_s, bulk=True)
        if len(reply.payload) != self.outgoing.coding.size(half, index):
            raise ProtocolViolation("a slice has the wrong size")
        if await trio.to_thread.run_sync(_digest, reply.payload) != self._hashes[half][index]:
            raise ProtocolViolation("a slice differs from the hash its sender committed to")
        self.bytes_down += len(reply.payload)
        return reply.payload

    async def _give_up_on_suspect(self) -> None:
        await self._host.wait_suspect(self.terms.partner)
        self.fail(ConnectionLost("the partner fell silent"))

    def fail(self, error: BarnraiseError) -> None:
        """End the exchange with `error`, unless it has failed already."""
        if self.failure is None:
            self.failure = error
        self._scope.cancel()


def _digest(data: memoryview) -> bytes:
    return blake3(data).digest()
