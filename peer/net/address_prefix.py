"""The address prefix of a peer: what one host or household has for nothing, whatever it does to its other bits."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import Final

RELAYED: Final = "relayed"
"""The prefix of all peers that are seen only through a relay, which hides their addresses."""

_BITS: Final = {4: 24, 6: 64}


def prefix_of(ip: str | None) -> str:
    """Return the /24 of an IPv4 address or the /64 of an IPv6 address; `RELAYED` if there is none."""
    if ip is None:
        return RELAYED
    address = ip_address(ip.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    bits = _BITS[address.version]
    host_bits = address.max_prefixlen - bits
    return f"{type(address)(int(address) >> host_bits << host_bits)}/{bits}"


def announced_prefixes(addresses: tuple[str, ...]) -> frozenset[str]:
    """Return the prefixes of multiaddrs that begin with an IP address."""
    parts = (address.split("/")[1:3] for address in addresses)
    return frozenset(prefix_of(host) for family, host in parts if family in ("ip4", "ip6"))
