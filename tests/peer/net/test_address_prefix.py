"""The prefix of an address is what one household has for nothing."""

from __future__ import annotations

import pytest

from peer.net.address_prefix import RELAYED, announced_prefixes, prefix_of


@pytest.mark.parametrize(
    ("ip", "prefix"),
    [
        ("203.0.113.7", "203.0.113.0/24"),
        ("::ffff:203.0.113.200", "203.0.113.0/24"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, RELAYED),
    ],
)
def test_prefix_of_an_address(ip: str | None, prefix: str) -> None:
    assert prefix_of(ip) == prefix


def test_prefixes_that_a_peer_announces() -> None:
    addresses = ("/ip4/203.0.113.7/tcp/1/p2p/x", "/ip4/203.0.113.8/tcp/1", "/dns4/example.org/tcp/1", "/ip6/::1/tcp/1")
    assert announced_prefixes(addresses) == {"203.0.113.0/24", "::/64"}
