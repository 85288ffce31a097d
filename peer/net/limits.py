"""Caps of the network process: what other peers may take of it, and how long it waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio


@dataclass(frozen=True)
class NetLimits:
    """Sizes in bytes, times in seconds. The defaults suit a volunteer's machine with 8 GB of memory."""

    header_bytes: int = 1 << 20
    """Largest typed header (method name and body) of a call or reply."""
    calls_out_per_peer: int = 64
    """Calls we keep open to one peer. Further ones wait within their own deadline."""
    calls_in_per_peer: int = 160
    """Calls one peer may keep open to us. Above `calls_out_per_peer`: a slot is free only after its reply has left."""
    calls_in_total: int = 1024
    payload_bytes_in_flight: int = 1 << 30
    """Memory for payloads being received or handled, all peers together; one peer gets at most half."""
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


class ByteBudget:
    """A fair semaphore over bytes: claims wait in the order of their arrival until they fit.

    A claim above the whole budget is cut to it, so that a big payload passes alone instead of never. One key (a peer)
    holds at most half, so that no peer starves the others.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._free = total_bytes
        self._held: dict[str, int] = {}
        self._queue: deque[tuple[str, int, trio.Event]] = deque()

    @property
    def free_bytes(self) -> int:
        return self._free

    @asynccontextmanager
    async def claim(self, key: str, size_bytes: int) -> AsyncIterator[None]:
        """Hold `size_bytes` of `key`'s share inside the block."""
        size = min(size_bytes, self._total)
        if size == 0:
            yield
            return
        admitted = trio.Event()
        entry = (key, size, admitted)
        self._queue.append(entry)
        self._admit()
        try:
            await admitted.wait()
            yield
        finally:
            if admitted.is_set():
                self._free += size
                self._held[key] -= size
                if self._held[key] == 0:
                    del self._held[key]
            else:
                self._queue.remove(entry)
            self._admit()

    def _admit(self) -> None:
        blocked: list[tuple[str, int, trio.Event]] = []
        while self._queue:
            key, size, admitted = self._queue.popleft()
            held = self._held.get(key, 0)
            over_share = held > 0 and held + size > self._total // 2
            if over_share:
                blocked.append((key, size, admitted))  # this peer waits for its own claims, the others do not
                continue
            if size > self._free:
                blocked.append((key, size, admitted))
                break
            self._free -= size
            self._held[key] = held + size
            admitted.set()
        self._queue.extendleft(reversed(blocked))
