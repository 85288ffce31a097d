"""The sessions at one server, and how they share its places and its memory.

Keys cost nothing, so what clients have is shared by the address prefixes at which they are seen, then by the clients of
one. All that come through a relay are one prefix, as are all of one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from peer.net.strangers.shares import SharedSlots
from swarm.serving.output_log import SESSION_BYTES_MAX
from swarm.serving.served_session import ServedSession

SESSIONS_MAX: Final = 512
SESSIONS_PER_CLIENT_MAX: Final = 64
LOGS_BYTES_MAX: Final = 1 << 30
"""Of what all sessions have sent."""


class SessionTable:
    """The sessions at one server, by their ids and by their numbers at its worker."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, ServedSession] = {}
        self._by_number: dict[int, ServedSession] = {}
        self._slots = SharedSlots[ServedSession](SESSIONS_MAX, lambda session: session.last_used)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ServedSession]:
        """Yield the sessions that are there now, whatever happens to them meanwhile."""
        return iter(tuple(self._by_id.values()))

    def __contains__(self, session: ServedSession) -> bool:
        return self._by_id.get(session.id) is session

    @property
    def clients(self) -> frozenset[str]:
        """The peers that have sessions."""
        return frozenset(session.client for session in self)

    def find(self, id: bytes) -> ServedSession | None:
        """Return the session of that id."""
        return self._by_id.get(id)

    def numbered(self, number: int) -> ServedSession | None:
        """Return the session that the worker knows by that number."""
        return self._by_number.get(number)

    def add(self, session: ServedSession) -> ServedSession | None:
        """Give a place to a session. Return the one that has to end for it, which is itself if there is no place."""
        if sum(other.client == session.client for other in self) >= SESSIONS_PER_CLIENT_MAX:
            return session
        loser = self._slots.add(session, session.client, session.prefix)
        if loser is not session:
            self._by_id[session.id] = self._by_number[session.number] = session
        return loser

    def remove(self, session: ServedSession) -> bool:
        """Free the place of a session. Return whether it had one."""
        if session not in self:
            return False
        del self._by_id[session.id]
        self._by_number.pop(session.number, None)
        self._slots.remove(session)
        return True

    def share_logs(self) -> None:
        """Divide the memory of what was sent between the prefixes, that of each between its clients, and theirs between
        their sessions."""
        count = Counter((session.prefix, session.client) for session in self)
        clients = Counter(prefix for prefix, _ in count)
        for session in self:
            parts = len(clients) * clients[session.prefix] * count[session.prefix, session.client]
            session.log.fit(min(SESSION_BYTES_MAX, LOGS_BYTES_MAX // parts))
