"""How a machine is reached by other peers, and finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Reach:
    """The user's choices for one machine on the network. Addresses are multiaddrs."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    """Addresses to announce in place of those derived from `listen`."""
    relays: tuple[str, ...] = ()
    """Full addresses of public relays at which to hold a reservation, for a peer that cannot be dialled."""
    map_port: bool = False
    """Whether the router is asked to forward the port (`peer.net.nat.port_mapping`), unless `announce` is given."""
    lan: bool = False
    """Whether to find, and be found by, peers of the run on the local network."""
    bootstrap: tuple[str, ...] = ()
    """Full addresses of peers of the run. A coordinator names them in its invite."""


LOCAL: Final = Reach(("/ip4/127.0.0.1/tcp/0",))
"""Reached on this machine alone."""
