"""Caps of the network process: what other peers may take of it, and how long it waits for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.errors import ConnectionLost
from peer.net.admissions import Admissions
from peer.net.wire import PIECE_BYTES

RATE_FLOOR: Final = 64_000
"""Bytes a second. A payload below it keeps its memory only as long as no other payload waits for memory."""
PAYLOAD_GRACE_S: Final = 5.0
REPLY_GRACE_S: Final = 15.0
_WAITING_MAX: Final = 64  # claims of one peer: as many calls as an honest one opens
_STRANGER_WAITING_MAX: Final = 8
_LOOK_S: Final = 1.0  # how often a waiting claim looks for payloads below the floor


@dataclass(frozen=True)
class NetLimits:
    """Sizes in bytes, times in seconds. The defaults suit a volunteer's machine with 8 GB of memory."""

    calls_out_per_peer: int = 64
    """Calls we keep open to one peer. Further ones wait within their own deadline."""
    calls_in_per_peer: int = 160
    """Calls one peer may keep open to us. Above `calls_out_per_peer`: a slot is free only after its reply has left."""
    calls_in_per_client: int = 32
    """The same for a peer that is admitted to read, and below for one that is not admitted. Of peers that are admitted
    to take part, trusted or not, many are honest: a pipeline's stages keep dozens of calls open to each other."""
    calls_in_per_stranger: int = 8
    calls_in_total: int = 1024
    """At a guarded host the last quarter is kept for trusted peers."""
    payload_bytes_in_flight: int = 1 << 30
    """Memory for payloads being received, handled or sent back, all peers together; one peer gets at most half."""
    flow_bytes_in_flight: int = 128 << 20
    """Memory for large messages of flows on their way here, all peers together; one peer gets at most half."""
    stranger_header_bytes: int = 32 << 20
    """Memory for the large headers that all untrusted peers together are sending."""
    stranger_reply_bytes: int = 12 << 20
    """Memory for replies of methods that are not for members only, to all untrusted peers together."""
    header_timeout_s: float = 10.0
    """For the first frame of an inbound call."""
    payload_idle_s: float = 20.0
    """Longest pause inside an inbound payload."""
    call_timeout_s: float = 900.0
    """Longest deadline a caller is granted."""
    dial_timeout_s: float = 10.0
    """For one address: TCP, Noise and Yamux together."""
    dial_stagger_s: float = 0.25
    """Pause before the next address is tried beside those still pending (RFC 8305)."""
    ping_interval_s: float = 2.0
    suspect_after_s: float = 6.0
    """Silence after which a watched peer counts as dead or frozen."""
    connections: int = 300
    connections_per_peer: int = 8
    addresses_per_peer: int = 16


@dataclass(eq=False)
class Claim:
    """One payload's share of the memory. It ends with ConnectionLost if it is dropped for another."""

    peer: str
    transfer_bytes: int
    """The payload's size; `done_bytes` of it have been transferred."""
    is_reply: bool = False
    own_rate: float | None = None
    """Our own cap on this direction, bytes a second."""
    done_bytes: int = 0
    held_bytes: int = 0
    since: float = 0.0
    """When it was admitted, in trio's time: a payload that waits in our queue is not late."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    admitted: trio.Event = field(default_factory=trio.Event)

    def advance(self, size_bytes: int) -> None:
        """Note bytes that were transferred."""
        self.done_bytes += size_bytes

    def is_slow(self, now: float, transfers: int) -> bool:
        """Whether the transfer is unfinished and below the floor, or below half its share of our own cap."""
        if self.done_bytes >= self.transfer_bytes:
            return False
        floor = RATE_FLOOR if self.own_rate is None else min(RATE_FLOOR, self.own_rate / (2 * max(transfers, 1)))
        late_s = now - self.since - (REPLY_GRACE_S if self.is_reply else PAYLOAD_GRACE_S)
        sent = self.done_bytes + (PIECE_BYTES if self.is_reply else 0)  # a piece counts only when all of it has left
        return sent < floor * late_s


class ByteBudget:
    """Memory that peers share, in bytes. A claim waits until it fits.

    - A claim above what its peer may hold is cut to that, so that a big payload passes alone instead of never.
    - One peer holds at most half. Of those that wait, trusted peers are first, then the peers that hold least.
    - At a guarded host a quarter is a reserve: only a trusted peer that holds nothing yet may use it. So neither
      strangers nor a few members can keep another member from sending a payload.
    - While a claim waits for the memory of others, transfers below the rate floor are dropped. Without that need a slow
      link has all the time it takes. An untrusted peer's claim drops none of a trusted one's, and a trusted peer's only
      transfer is never dropped.
    """

    def __init__(self, total_bytes: int, admissions: Admissions | None = None) -> None:
        self._total = total_bytes
        self._free = total_bytes
        self._admissions = Admissions() if admissions is None else admissions
        self._held: dict[str, int] = {}
        self._claims: set[Claim] = set()
        self._queue: list[Claim] = []

    @property
    def free_bytes(self) -> int:
        return self._free

    def crowded(self, peer: str) -> bool:
        """Whether a peer has too many waiting claims to accept the next: its bytes wait somewhere, too."""
        stranger = self._admissions.guarded and not self._admissions.is_trusted(peer)
        return sum(claim.peer == peer for claim in self._queue) >= (_STRANGER_WAITING_MAX if stranger else _WAITING_MAX)

    def fits(self, peer: str, size_bytes: int) -> bool:
        """Whether a claim would be admitted at once."""
        claim = Claim(peer, size_bytes)
        return not self._queue and not self._over_share(claim) and self._size(claim) <= self._room(claim)

    @asynccontextmanager
    async def claim(
        self, peer: str, size_bytes: int, *, is_reply: bool = False, own_rate: float | None = None
    ) -> AsyncIterator[Claim]:
        """Hold `size_bytes` of the peer's share inside the block, whose transfers call `advance`.

        Raises ConnectionLost out of the block if the claim is dropped for another.
        """
        claim = Claim(peer, size_bytes, is_reply, own_rate)
        if size_bytes == 0:
            yield claim
            return
        self._queue.append(claim)
        self._admit()
        try:
            while not claim.admitted.is_set():
                with trio.move_on_after(_LOOK_S):
                    await claim.admitted.wait()
                if not claim.admitted.is_set():
                    self._drop_slow(claim)
            with claim.scope:
                yield claim
        finally:
            self._release(claim)
            self._admit()
        if claim.scope.cancelled_caught:
            raise ConnectionLost(f"{peer} sent or read too slowly while others waited for memory")

    def shrink(self, claim: Claim, size_bytes: int) -> None:
        """Free what a claim turned out not to need."""
        spare = max(claim.held_bytes - size_bytes, 0)
        claim.transfer_bytes = size_bytes
        claim.held_bytes -= spare
        self._free += spare
        if spare:
            self._held[claim.peer] -= spare
            self._admit()

    def _release(self, claim: Claim) -> None:
        if claim not in self._claims:
            self._queue.remove(claim)
            return
        self._claims.remove(claim)
        self._free += claim.held_bytes
        self._held[claim.peer] -= claim.held_bytes
        if not any(other.peer == claim.peer for other in self._claims):
            del self._held[claim.peer]

    def _admit(self) -> None:
        """Admit the claims that fit. One that does not holds back the later ones, unless they may use the reserve."""
        if not self._queue:
            return
        is_blocked = False
        ranked = sorted(self._queue, key=lambda claim: (not self._trusts(claim), self._held.get(claim.peer, 0)))
        for claim in ranked:
            if self._over_share(claim):
                continue  # this peer waits for its own claims, the others do not
            size = self._size(claim)
            if size > self._room(claim) or (is_blocked and not self._is_first(claim)):
                is_blocked = True
                continue
            self._queue.remove(claim)
            self._claims.add(claim)
            self._free -= size
            self._held[claim.peer] = self._held.get(claim.peer, 0) + size
            claim.held_bytes, claim.since = size, trio.current_time()
            claim.admitted.set()

    def _drop_slow(self, waiting: Claim) -> None:
        """Drop the transfers below the floor, unless `waiting` waits for its own peer's."""
        if self._over_share(waiting):
            return
        now = trio.current_time()
        transfers = sum(claim.done_bytes < claim.transfer_bytes for claim in self._claims)
        for claim in tuple(self._claims):
            if self._trusts(claim) and (not self._trusts(waiting) or self._held[claim.peer] == claim.held_bytes):
                continue
            if claim.is_slow(now, transfers):
                claim.scope.cancel()

    def _trusts(self, claim: Claim) -> bool:
        return self._admissions.is_trusted(claim.peer)

    def _over_share(self, claim: Claim) -> bool:
        held = self._held.get(claim.peer, 0)
        return held > 0 and held + self._size(claim) > self._total // 2

    def _is_first(self, claim: Claim) -> bool:
        """Whether the claim is that of a trusted peer which holds nothing."""
        return self._trusts(claim) and claim.peer not in self._held

    def _reserve(self, claim: Claim) -> int:
        return 0 if not self._admissions.guarded or self._is_first(claim) else self._total // 4

    def _room(self, claim: Claim) -> int:
        return self._free - self._reserve(claim)

    def _size(self, claim: Claim) -> int:
        return min(claim.transfer_bytes, self._total - self._reserve(claim))
