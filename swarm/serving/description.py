"""How a block server describes itself to others."""

from __future__ import annotations

import secrets
import time

from peer.config import HiddenType
from peer.ipc.block_messages import WIRE_TYPES
from peer.ipc.sampling_options import OPTIONS
from peer.ipc.span import Span
from peer.net.host import Host
from swarm.inference.record import ServerRecord
from swarm.membership.member_record import NAME_CHARS_MAX, installed_version, short_addresses
from swarm.run.gate import Gate
from swarm.serving.config import ServeConfig
from swarm.serving.server import BlockServer


class ServerDescription:
    """The constant facts about a server, and its load."""

    def __init__(self, host: Host, gate: Gate, config: ServeConfig) -> None:
        self._host, self._gate, self._config = host, gate, config
        self._session, self._began = secrets.token_hex(8), time.time()

    def record(self, span: Span, dtype: HiddenType, pages: int, server: BlockServer | None) -> ServerRecord:
        """Return the record as it is now. `server` takes sessions, if any does."""
        host, load = self._host, None if server is None else server.worker_load
        return ServerRecord(
            session=self._session,
            name="".join(c if c.isprintable() else "?" for c in self._config.name[:NAME_CHARS_MAX]),
            version=installed_version(),
            addresses=short_addresses(host.addresses, host.peer_id),
            joined_at=self._began,
            at=time.time(),
            first=span.first,
            end=span.end,
            dtype=dtype,
            wire=WIRE_TYPES,
            options=OPTIONS,
            pages=pages,
            pages_free=pages if load is None else load.pages_free,
            sessions=0 if server is None else server.sessions,
            waiting_tokens=0 if load is None else load.waiting_tokens,
            step_ms=0.0 if load is None else load.step_ms,
            uplink_bytes_s=0.0 if server is None else server.uplink.bytes_s,
            tokens=0 if server is None else server.tokens,
            bytes_up=host.bytes_up,
            bytes_down=host.bytes_down,
            pinned=self._config.blocks is not None,
            credential=self._gate.chain,
        )
