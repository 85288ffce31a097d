"""Messages about a head that this node has not reached yet, kept until it does: some overtake the votes for that
head."""

from __future__ import annotations

from typing import Final, NamedTuple

from swarm.protocol.agreement.messages import Message
from swarm.protocol.agreement.output import encode

OF_ONE_PEER_MAX: Final = 8
PEERS_MAX: Final = 128
BYTES_MAX: Final = 20 << 20
"""As encoded, of all together: a message may have a megabyte, and any identity may send them."""


class _Early(NamedTuple):
    head_hash: bytes
    message: Message
    size_bytes: int


class EarlyMessages:
    """The latest few early messages of each peer. Messages of the peer kept for longest are evicted first; their sender
    repeats them."""

    def __init__(self) -> None:
        self._kept: dict[str, list[_Early]] = {}
        self._bytes = 0

    def keep(self, head_hash: bytes, peer: str, message: Message) -> None:
        """Keep a message about the round after that head."""
        mine = self._kept.setdefault(peer, [])
        mine.append(_Early(head_hash, message, len(encode(message))))
        self._bytes += mine[-1].size_bytes
        if len(mine) > OF_ONE_PEER_MAX:
            self._bytes -= mine.pop(0).size_bytes
        while len(self._kept) > PEERS_MAX or (self._bytes > BYTES_MAX and len(self._kept) > 1):
            oldest = next(other for other in self._kept if other != peer)
            self._bytes -= sum(early.size_bytes for early in self._kept.pop(oldest))

    def take(self, head_hash: bytes) -> list[tuple[str, Message]]:
        """Return the messages about that round, and forget all others."""
        kept = sorted(self._kept.items())
        found = [(peer, early.message) for peer, mine in kept for early in mine if early.head_hash == head_hash]
        self._kept.clear()
        self._bytes = 0
        return found
