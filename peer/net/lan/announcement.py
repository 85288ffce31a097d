"""A peer's announcement on its local network: the name of a DNS-SD service, and addresses there.

    12D3KooW...-<tag>._barnraise._tcp.local.

The tag is a keyed hash of run and peer. It shows other peers of the run that this one knows the run's id, and all
others nothing: not the run, and not which machines are in one. Nor can they make a tag for a peer of their own.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from itertools import islice
from typing import Final

from blake3 import blake3

from peer.identity import is_peer_id
from peer.net.address_book import closed_range

SERVICE: Final = "_barnraise._tcp.local."
ADDRESSES_MAX: Final = 8
"""Of those that one peer announces."""
_TAG_CHARS: Final = 10  # a peer's id, a dash and the tag are the 63 bytes that a name may have; a guess costs a packet
_NAME_CHARS_MAX: Final = 64 + len(SERVICE)


def instance_name(run_id: str, peer_id: str) -> str:
    """Return the name by which a peer of a run is announced."""
    return f"{peer_id}-{tag_of(run_id, peer_id)}.{SERVICE}"


def announced_peer(name: str, run_id: str) -> str | None:
    """Return the peer of the run that bears this name; None for one of another run, and for anything else."""
    if len(name) > _NAME_CHARS_MAX or not name.isascii():
        return None
    peer, _, tag = name.removesuffix(f".{SERVICE}").partition("-")
    expected = tag_of(run_id, peer)
    return peer if hmac.compare_digest(tag.encode(), expected.encode()) and is_peer_id(peer) else None


def tag_of(run_id: str, peer_id: str) -> str:
    """Return what only a peer that knows the run's id can say of a peer."""
    secret = f"{run_id} {peer_id}".encode()
    return blake3(secret, derive_key_context="barnraise local network").hexdigest()[:_TAG_CHARS]


def local_addresses(listening: Iterable[str]) -> tuple[tuple[str, ...], int]:
    """Return the IP addresses of private networks at which a host listens, and the port there: that of the first, as an
    announcement has only one. Without any, the port is 0."""
    found = [(parts[2], int(parts[4])) for parts in (address.split("/") for address in listening) if is_local(parts[2])]
    port = found[0][1] if found else 0
    return tuple(dict.fromkeys(ip for ip, at in found if at == port))[:ADDRESSES_MAX], port


def is_local(ip: str) -> bool:
    """Whether an IP address is of a private network, a link or this machine; also False for what is none."""
    try:
        parsed = ip_address(ip)
    except ValueError:
        return False
    return closed_range(ip) is not None and (parsed.is_private or parsed.is_link_local)


def dialled(ips: Iterable[str], port: int, own: Sequence[str]) -> tuple[str, ...]:
    """Return the multiaddrs to dial of those that were announced: of the ranges in which we are, so that a name on this
    network leads into no other one of ours. `own`: our addresses on it."""
    ranges = {closed_range(ip) for ip in own}
    taken = [ip for ip in islice(ips, ADDRESSES_MAX) if is_local(ip) and closed_range(ip) in ranges]
    kinds = (("ip6" if ":" in ip else "ip4", ip) for ip in dict.fromkeys(taken))
    return tuple(f"/{kind}/{ip}/tcp/{port}" for kind, ip in kinds) if 0 < port < 1 << 16 else ()
