"""The update that a peer exchanges next. Its first half, phi, is ready before the inner steps are done."""

from __future__ import annotations

import torch
import trio

from peer.errors import RoundDiscarded
from swarm.gossip.coding import Packed, PairCoding, PairMessage
from swarm.gossip.messages import Half


class OutgoingUpdate:
    """One round's update of this peer. phi is encoded when a partner first asks for it, delta by `add_delta`.

    `theta` must not change until `close`. Encoding runs in threads."""

    def __init__(self, coding: PairCoding, theta: torch.Tensor) -> None:
        self.coding = coding
        self._theta = theta
        self._phi: Packed | None = None
        self._packing = trio.Lock()
        self._delta: Packed | None = None
        self._closed = False
        self.delta_ready = trio.Event()
        """Set when the delta is ready, or when the update is closed without it."""

    async def _encoded_phi(self) -> Packed:
        async with self._packing:
            if self._phi is None:
                if self._closed:
                    raise RoundDiscarded("that round is over")
                self._phi = await trio.to_thread.run_sync(self.coding.pack_phi, self._theta)
            return self._phi

    async def add_delta(self, delta: torch.Tensor) -> float:
        """Encode delta once the inner steps are done; return its norm as partners see it. Raises ProtocolViolation if
        `delta` is not finite."""
        self._delta = await trio.to_thread.run_sync(self.coding.pack_delta, delta)
        self.delta_ready.set()
        return await trio.to_thread.run_sync(self.coding.delta_norm, self._delta)

    async def half(self, which: Half) -> Packed:
        """Return one half, once it exists. Raises RoundDiscarded if it never will, ProtocolViolation if the weights do
        not fit the codec."""
        if which == "phi":
            return await self._encoded_phi()
        await self.delta_ready.wait()
        if self._delta is None:
            raise RoundDiscarded("this peer has done no work in that round")
        return self._delta

    async def message(self) -> PairMessage:
        return PairMessage(await self.half("phi"), await self.half("delta"))

    async def restore_residual(self) -> None:
        """Put delta back into the error feedback: no partner has merged it."""
        if self._delta is not None:
            await trio.to_thread.run_sync(self.coding.restore_residual, self._delta)

    async def close(self) -> None:
        """Encode no more: theta is about to change. Already encoded parts can still be fetched."""
        async with self._packing:
            self._closed = True
            self.delta_ready.set()
