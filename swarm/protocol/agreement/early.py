"""Messages about a head that this node has not reached yet, kept until it does: some overtake the votes for that
head."""

from __future__ import annotations

from typing import Final

from swarm.protocol.agreement.messages import Message

OF_ONE_PEER_MAX: Final = 8
PEERS_MAX: Final = 128


class EarlyMessages:
    """The latest few early messages of each peer."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[bytes, Message]]] = {}

    def keep(self, head_hash: bytes, peer: str, message: Message) -> None:
        """Keep a message about the round after that head."""
        if peer not in self._kept and len(self._kept) >= PEERS_MAX:
            del self._kept[next(iter(self._kept))]
        mine = self._kept.setdefault(peer, [])
        mine.append((head_hash, message))
        del mine[:-OF_ONE_PEER_MAX]

    def take(self, head_hash: bytes) -> list[tuple[str, Message]]:
        """Return the messages about that round, and forget all others."""
        found = [(peer, m) for peer, kept in sorted(self._kept.items()) for name, m in kept if name == head_hash]
        self._kept.clear()
        return found
