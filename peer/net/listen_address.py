"""Addresses to listen at and to announce: parsing, checking, expanding wildcards."""

from __future__ import annotations

import errno
import socket

from libp2p.utils.address_validation import get_available_interfaces
from multiaddr import Multiaddr

from peer.errors import ConfigError, ResourceError


def listen_address(address: str) -> Multiaddr:
    """Parse an address to listen at. Raises ConfigError unless it is TCP over IP."""
    example = "/ip4/0.0.0.0/tcp/4001"
    parsed, names = _parse_address("--listen", address, example)
    if len(names) != 2 or names[0] not in ("ip4", "ip6") or names[1] != "tcp":
        raise ConfigError(f"--listen {address} is not TCP over IP: use one like {example}")
    return parsed


def announced_address(address: str, peer_id: str) -> Multiaddr:
    """Parse an address to announce: an IP address or DNS name, our own peer id may follow. Raises ConfigError."""
    example = "/ip4/203.0.113.7/tcp/4001"
    parsed, names = _parse_address("--announce", address, example)
    parts = names[:-1] if address.endswith(f"/p2p/{peer_id}") else names
    if len(parts) != 2 or parts[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or parts[1] != "tcp":
        raise ConfigError(f"--announce {address} is no TCP address of this peer: use one like {example}")
    if parsed.value_for_protocol("tcp") == "0" or parsed.value_for_protocol(parts[0]) in ("0.0.0.0", "::"):
        raise ConfigError(f"--announce {address} is an address that others cannot dial: use one like {example}")
    return parsed


def _parse_address(option: str, address: str, example: str) -> tuple[Multiaddr, list[str]]:
    """Return the address and the names of its protocols."""
    try:
        parsed = Multiaddr(address)
        return parsed, [protocol.name for protocol in parsed.protocols()]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{option} {address} is no multiaddr: use one like {example}") from error


def check_port_free(address: str) -> None:
    """Raise ResourceError if the port is taken: the library binds with SO_REUSEPORT, which silently shares it."""
    _, family, ip, _, port = address.split("/")
    with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, int(port)))
        except OSError as error:
            problem = f"port {port} is in use" if error.errno == errno.EADDRINUSE else f"cannot listen on {address}"
            raise ResourceError(f"{problem} ({error.strerror}): choose another with --listen") from error


def expand_wildcard(address: str) -> list[str]:
    """Return the address, or for a wildcard one address for each interface, loopback only if there is no other."""
    _, family, ip, _, port = address.split("/")
    if ip not in ("0.0.0.0", "::"):
        return [address]
    candidates = [str(interface) for interface in get_available_interfaces(int(port))]
    same = [a for a in candidates if a.startswith(f"/{family}/") and not a.startswith("/ip6/fe80")]
    outside = [a for a in same if not a.startswith(("/ip4/127.", "/ip6/::1/"))]
    return outside or same
