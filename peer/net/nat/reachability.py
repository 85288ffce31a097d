"""How this machine and one other peer reach each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import trio

from peer.errors import DialError
from peer.net.host import Host
from peer.net.nat.hole_punch import Path


@dataclass(frozen=True)
class Reachability:
    """The path to one peer, in one word and in one sentence."""

    kind: Literal["public", "hole-punched", "relayed", "unreachable"]
    detail: str


async def probe(host: Host, peer: str, *, timeout_s: float) -> Reachability:
    """Connect to `peer` if need be, wait for a hole punch to end, and return the path that is left."""
    path: Path | None = None
    with trio.move_on_after(timeout_s):
        try:
            await host.connect(peer, timeout_s=timeout_s)
        except DialError as error:
            return Reachability("unreachable", str(error))
        path = await host.traversal.settled_path(peer)
    match path or host.traversal.path(peer):
        case "direct":
            return Reachability("public", f"{peer} and this machine are connected directly")
        case "hole-punched":
            return Reachability("hole-punched", f"{peer} is connected directly, through a hole punched into the NAT")
        case "relayed":
            return Reachability("relayed", f"{peer} is connected through a relay only: forward a TCP port for speed")
        case _:
            return Reachability("unreachable", f"the connection to {peer} was lost: try again")
