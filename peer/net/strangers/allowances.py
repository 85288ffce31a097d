"""Allowances of strangers: how often peers that are admitted to nothing may connect to us and call us.

Before it is admitted a peer needs few calls: a greeting, pings, the manifest, and the proof of what it is. Each call
costs us a few tenths of a millisecond and each handshake more, so a stranger that is thrown out and dials again, as
often as it likes and as new identities, could take a core. Here a call over the allowance costs a tenth of a
millisecond: its stream is reset before its protocol is negotiated. A connection over the allowance is closed before its
handshake.

Calls are counted by peer and by network (`shares.address_group`), and only those of peers that are neither admitted nor
trusted. The last of a network's calls are kept for peers that have called little, so that a few strangers that call
without pause keep no newcomer out. Connections are counted by network only, since the dialler is not known yet: beside
a flood from its own network an honest peer may have to dial more than once, or to be dialled. Existing connections
stay. At a host of no run every peer is a stranger, and there are no limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import trio
from libp2p.peer.id import ID

from peer.bounds import Latest
from peer.net.admissions import Admissions
from peer.net.strangers.shares import address_group

PEER_CALLS: Final = (24, 8.0)  # at once, and a second on average; here and below
GROUP_CALLS: Final = (64, 30.0)
GROUP_CALLS_KEPT: Final = 16  # of them, for peers that have at least half of their own left
GROUP_CONNECTIONS: Final = (64, 6.0)
KEYS_MAX: Final = 1024  # of each kind; one that is forgotten has its whole allowance again, as one never seen

Clock = Callable[[], float]


class Remote(Protocol):
    """A connection, as far as it identifies its other end."""

    @property
    def peer_id(self) -> ID: ...
    def get_remote_address(self) -> tuple[str, int] | None: ...


class Allowances:
    """The allowances of all strangers at one host. `clock` returns seconds."""

    def __init__(self, admissions: Admissions, clock: Clock = trio.current_time) -> None:
        self._admissions = admissions
        self._peer_calls = Allowance(*PEER_CALLS, clock)
        self._group_calls = Allowance(*GROUP_CALLS, clock)
        self._group_connections = Allowance(*GROUP_CONNECTIONS, clock)

    def take_connection(self, group: str) -> bool:
        """Whether a socket from `group` may begin its handshake."""
        return not self._admissions.guarded or self._group_connections.take(group)

    def take_call(self, connection: Remote) -> bool:
        """Whether the peer at the other end of a connection may open one more stream."""
        peer = str(connection.peer_id)
        if self._admissions.allows(peer, "client") or self._admissions.is_trusted(peer):
            return True
        remote = connection.get_remote_address()
        group = address_group(remote[0] if remote is not None else "")
        # A few strangers that call without pause take all that their network gets; a newcomer beside them comes first.
        keep = 0 if self._peer_calls.left(peer) >= PEER_CALLS[0] / 2 else GROUP_CALLS_KEPT
        return self._peer_calls.take(peer) and self._group_calls.take(group, keep)


class Allowance:
    """One allowance for each key: `burst` at once, `per_s` a second on average."""

    def __init__(self, burst: int, per_s: float, clock: Clock) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._left = Latest[str, tuple[float, float]](KEYS_MAX)  # key -> (left, at that time)

    def __len__(self) -> int:
        return len(self._left)

    def left(self, key: str) -> float:
        """Return what is left to `key`."""
        now = self._clock()
        left, at = self._left.get(key, (float(self._burst), now))
        return min(float(self._burst), left + (now - at) * self._per_s)

    def take(self, key: str, keep: int = 0) -> bool:
        """Take one of what is left to `key`. Returns False if there is none beside the `keep` that must stay."""
        left = self.left(key)
        taken = left >= 1 + keep
        self._left[key] = (left - taken, self._clock())
        return taken


def allowances_of(swarm: Any) -> Allowances:
    """Return the allowances at a swarm."""
    found = swarm.__dict__.get("_allowances")
    return found if isinstance(found, Allowances) else give_allowances(swarm, Admissions())


def give_allowances(swarm: Any, admissions: Admissions) -> Allowances:
    """Give the swarm's strangers new allowances. `admissions` knows who is none."""
    swarm._allowances = given = Allowances(admissions)
    return given
