"""Peers that may ask to join: a limited number per address prefix, by the addresses at which this peer sees them.

This filter runs before the node, which knows no addresses. Other members cannot check it: two peers may see a third at
different addresses.
"""

from __future__ import annotations

from typing import Final

import trio

from peer.bounds import MEMBERS_MAX
from peer.net.address_prefix import announced_prefixes, prefix_of
from peer.net.host import Host
from swarm.protocol.head import Head
from swarm.protocol.prefix_cap import PrefixCap

_OWN: Final = "own address "


class NewcomerFilter:
    """The join requests that one peer receives."""

    def __init__(self, host: Host, per_prefix: int) -> None:
        """`per_prefix`: members of one address prefix in a head at most."""
        self._host, self._capped, self.cap = host, per_prefix < MEMBERS_MAX, PrefixCap(per_prefix)

    def lets_in(self, peer: str, head: Head) -> bool:
        """Return whether a request of that peer counts after `head`."""
        if not self._capped:
            return True
        return self.cap.lets_in(peer, self._prefix(peer), self._inside(head), trio.current_time())

    def _inside(self, head: Head) -> dict[str, str]:
        """Return the prefix of each member and learner that is seen now."""
        host = self._host
        peers = [member.peer for member in (*head.members, *(learner.member for learner in head.learners))]
        inside = {peer: self._prefix(peer) for peer in peers if peer in host.connected}
        if host.peer_id in peers:  # it does not see its own address
            inside |= {f"{_OWN}{prefix}": prefix for prefix in announced_prefixes(host.addresses)}
        return inside

    def _prefix(self, peer: str) -> str:
        return prefix_of(self._host.remote_ip(peer))
