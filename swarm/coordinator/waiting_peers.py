"""The join requests that an authority has received. No clock of its own."""

from __future__ import annotations

from typing import Final

from swarm.protocol.head import Member
from swarm.protocol.join_requests import WAITING_FACTOR
from swarm.protocol.messages import JoinRequest

REQUESTS_MAX: Final = 1024


class WaitingPeers:
    """Peers that asked to join, each until its request expires. Every method takes the current time in seconds."""

    def __init__(self, lasts_s: float, per_prefix: int) -> None:
        """`per_prefix`: members of one address prefix in the group at most."""
        self._lasts_s, self._per_prefix = lasts_s, per_prefix
        self._requests: dict[str, tuple[JoinRequest, str, float]] = {}  # (request, prefix, until)

    def add(self, request: JoinRequest, prefix: str, now: float) -> None:
        """Keep a request of a peer seen at an address of that prefix. Drops it where there are too many already."""
        if request.member.peer not in self._requests and not self._has_room(prefix):
            self.peers(now)
            if not self._has_room(prefix):
                return
        self._requests[request.member.peer] = (request, prefix, now + self._lasts_s)

    def _has_room(self, prefix: str) -> bool:
        of_prefix = sum(entry[1] == prefix for entry in self._requests.values())
        return len(self._requests) < REQUESTS_MAX and of_prefix < WAITING_FACTOR * self._per_prefix

    def peers(self, now: float) -> list[str]:
        """Return the peers that wait, at whatever head."""
        self._requests = {peer: entry for peer, entry in self._requests.items() if entry[2] > now}
        return list(self._requests)

    def members_at(self, head_hash: bytes, now: float) -> list[tuple[Member, str]]:
        """Return the waiting peers that hold the state of that head, each with its prefix, longest waiting first."""
        self.peers(now)
        return [(request.member, prefix) for request, prefix, _ in self._requests.values() if request.head == head_hash]
