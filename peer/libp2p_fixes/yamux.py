"""Yamux: whole frames, enforced windows."""

from __future__ import annotations

import trio
from libp2p.stream_muxer.yamux.yamux import Yamux


def apply() -> None:
    """Never cut a frame in half."""
    stock_write_frame = Yamux._write_frame

    async def write_frame(self: Yamux, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            await stock_write_frame(self, data)

    Yamux._write_frame = write_frame  # type: ignore[method-assign]
