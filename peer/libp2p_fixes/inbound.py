"""Inbound connections: slots that come back."""

from __future__ import annotations

import logging
from typing import Any

from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm

logger = logging.getLogger(__name__)


def apply() -> None:
    """Hold an inbound slot for as long as its connection lives."""

    async def do(self: Any, stream: Any, maddr: Any, failure_event: Any) -> None:
        remote = self._build_remote_multiaddr(stream)
        if remote is not None and not await self.connection_gate.is_allowed(remote):
            await stream.close()
            return
        raw = RawConnection(stream, False)
        try:
            muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
            await muxed.event_closed.wait()
        except Exception as error:
            logger.debug("inbound connection failed: %r", error)
            await raw.close()

    Swarm._do_handle_inbound_connection = do  # type: ignore[method-assign]
