"""What a peer brings to its next meeting, half of it ready before its inner steps are done."""

from __future__ import annotations

import torch
import trio

from peer.errors import RoundDiscarded
from swarm.gossip.coding import Packed, PairCoding, PairMessage
from swarm.gossip.messages import Half


class OutgoingUpdate:
    """One round's message of this peer. phi is coded when somebody first asks for it, delta when `seal` is called.

    `theta` must not change until the letter is closed. Coding runs in threads."""

    def __init__(self, coding: PairCoding, theta: torch.Tensor) -> None:
        self.coding = coding
        self._theta = theta
        self._phi: Packed | None = None
        self._packing = trio.Lock()
        self._delta: Packed | None = None
        self._closed = False
        self.sealed = trio.Event()
        """Set when delta is there, or when the letter is closed without."""

    async def phi(self) -> Packed:
        """`ProtocolViolation` if the weights do not fit the codec."""
        async with self._packing:
            if self._phi is None:
                if self._closed:
                    raise RoundDiscarded("that round is over")
                self._phi = await trio.to_thread.run_sync(self.coding.pack_phi, self._theta)
            return self._phi

    async def seal(self, delta: torch.Tensor) -> float:
        """The work is done; returns the norm of delta as others see it. `ProtocolViolation` if `delta` is not finite:
        then the letter is of no use."""
        self._delta = await trio.to_thread.run_sync(self.coding.pack_delta, delta)
        self.sealed.set()
        return await trio.to_thread.run_sync(self.coding.delta_norm, self._delta)

    async def half(self, which: Half) -> Packed:
        """Waits until it is there. `RoundDiscarded` if it never will be."""
        if which == "phi":
            return await self.phi()
        await self.sealed.wait()
        if self._delta is None:
            raise RoundDiscarded("this peer has done no work in that round")
        return self._delta

    async def message(self) -> PairMessage:
        return PairMessage(await self.half("phi"), await self.half("delta"))

    async def restore_residual(self) -> None:
        """Nobody met us with this letter: a codec with error feedback sends again what it held."""
        if self._delta is not None:
            await trio.to_thread.run_sync(self.coding.restore_residual, self._delta)

    async def close(self) -> None:
        """theta is about to change. What is packed can still be fetched; what is not never will be."""
        async with self._packing:
            self._closed = True
            self.sealed.set()
