"""Where a peer is seen, and whether it is trusted: what decides how much room its free identities get."""

from __future__ import annotations

from dataclasses import dataclass

from peer.net.address_book import closed_range
from peer.net.address_prefix import prefix_of


@dataclass(frozen=True)
class Origin:
    """The connection of a peer."""

    prefix: str = ""
    """The /24 or /64 of its IP address as we see it."""
    is_public: bool = False
    """Whether few honest peers share the prefix. On loopback, in a LAN and behind a relay many do."""
    trusted: bool = False

    @property
    def crowd(self) -> str | None:
        """The prefix if it limits this peer."""
        return self.prefix if self.is_public and not self.trusted else None


TRUSTED: Origin = Origin(trusted=True)


def seen_at(ip: str | None) -> Origin:
    """Return the origin of a peer that is not trusted; `ip` is None behind a relay."""
    return Origin(prefix_of(ip), is_public=ip is not None and closed_range(ip) is None)
