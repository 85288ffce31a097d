"""A relay in a host of its own.

async with open_relay(identity, Reach(("/ip4/0.0.0.0/tcp/4001",))) as relay:
    print(relay.addresses)
    await trio.sleep_forever()
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from peer.errors import ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.limits import NetLimits
from peer.net.reach import Reach
from peer.net.relay.hop import HopServer
from peer.net.relay.ledger import RelayLimits

# Peers have no calls to make of a relay: a few small ones are answered as of any host.
_NET_LIMITS: Final = NetLimits(
    calls_in_per_peer=8,
    calls_in_total=256,
    payload_bytes_in_flight=4 << 20,
    flow_bytes_in_flight=4 << 20,
    connections=2048,
)


@asynccontextmanager
async def open_relay(identity: Identity, reach: Reach, limits: RelayLimits) -> AsyncIterator[HopServer]:
    """Run a relay inside the block.

    Raises ConfigError for a bad address, ResourceError where it cannot listen (port in use).
    """
    if reach.announce and reach.listen[0].endswith("/tcp/0"):
        raise ConfigError("--announce names a fixed port and --listen port 0: name the same port with --listen")
    config = open_host(identity=identity, events=EventLog(), reach=reach, bulk_port=None, limits=_NET_LIMITS)
    async with config as host:
        yield HopServer(host, limits)
