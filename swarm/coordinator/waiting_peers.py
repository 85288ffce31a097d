"""The join requests that an authority has received. No clock of its own."""

from __future__ import annotations

from typing import Final

from swarm.protocol.head import Member
from swarm.protocol.messages import JoinRequest

REQUESTS_MAX: Final = 1024


class WaitingPeers:
    """Peers that asked to join, each until its request expires. Every method takes the current time in seconds."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._requests: dict[str, tuple[JoinRequest, float]] = {}

    def add(self, request: JoinRequest, now: float) -> None:
        """Keep a request. Drops it where there are too many already."""
        if len(self._requests) < REQUESTS_MAX:
            self._requests[request.member.peer] = (request, now + self._lasts_s)

    def peers(self, now: float) -> list[str]:
        """Return the peers that wait, at whatever head."""
        self._requests = {peer: entry for peer, entry in self._requests.items() if entry[1] > now}
        return list(self._requests)

    def members_at(self, head_hash: bytes, now: float) -> list[Member]:
        """Return the waiting peers that hold the state of that head, sorted."""
        self.peers(now)
        return sorted(request.member for request, _ in self._requests.values() if request.head == head_hash)
