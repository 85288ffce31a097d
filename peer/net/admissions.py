"""Admissions of peers to this host, as stranger, client or member, and the peers that are trusted beyond that.

A host of no run serves every peer. Once a run guards it, a peer may call a method, and be called by one, only if the
method is open or the peer has proved what it is while it was connected (`swarm.run.gate`). Trust is scarce, access is
not always: in an open run every identity gets in, so caps that strangers fill are kept for peers that are *trusted*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from peer.errors import NotAdmitted

Access = Literal["open", "client", "member"]
"""The access that a peer needs: none, to read, or to take part."""

_RANK: Final[dict[Access, int]] = {"open": 0, "client": 1, "member": 2}


@dataclass(frozen=True)
class _Grant:
    access: Access
    until: float
    trusted: bool


class Admissions:
    """The admissions of every peer at one host. `clock` returns Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._granted: dict[str, _Grant] = {}
        self._trusted: dict[str, frozenset[str]] = {}
        self._barred: frozenset[str] = frozenset()
        self._guarded = False
        self.proof_is_enough = False
        """Whether who has proved a scarce credential is an anchor: where there are no heads that could say more."""

    @property
    def guarded(self) -> bool:
        """Whether peers must prove what they are; False at a host that belongs to no run."""
        return self._guarded

    @property
    def admitted(self) -> tuple[str, ...]:
        """The peers that hold a grant."""
        return tuple(self._granted)

    def guard(self) -> None:
        """Serve and call from now on only peers with a grant, but for open methods."""
        self._guarded = True

    def grant(self, peer: str, access: Access, until: float = float("inf"), *, trusted: bool) -> None:
        """Note what a connected peer has proved to be, until a Unix time. `trusted`: its proof is scarce."""
        self._granted[peer] = _Grant(access, until, trusted)

    def revoke(self, peer: str) -> None:
        """Forget what a peer has proved: its last connection has ended, or it is admitted no longer."""
        self._granted.pop(peer, None)

    def bar(self, peers: Iterable[str]) -> None:
        """Replace the peers that may call nothing but open methods, whatever they prove."""
        self._barred = frozenset(peers)
        for peer in self._barred:
            self.revoke(peer)

    def is_barred(self, peer: str) -> bool:
        """Whether a peer may call nothing but open methods, whatever it proves."""
        return peer in self._barred

    def trust(self, cause: str, peers: Iterable[str]) -> None:
        """Replace the peers trusted for `cause`: members of the last head, the authority, peers of the invite."""
        self._trusted[cause] = frozenset(peers)

    def allows(self, peer: str, access: Access) -> bool:
        """Whether a peer may call, and be called by, methods of this access."""
        if access == "open" or not self._guarded:
            return True
        if peer in self._barred:
            return False
        granted = self._granted.get(peer)
        return granted is not None and _RANK[granted.access] >= _RANK[access] and not self.is_over(granted.until)

    def ends(self, peer: str, known: float = float("inf")) -> float:
        """Return the Unix time at which the grant of a peer ends; `known` for one that holds none now."""
        granted = self._granted.get(peer)
        return known if granted is None else granted.until

    def is_over(self, until: float) -> bool:
        """Whether a grant until that time has ended."""
        return self._clock() > until

    def is_trusted(self, peer: str) -> bool:
        """Whether strangers give way to this peer. At a host of no run no peer is trusted."""
        if peer in self._barred or not self._guarded:
            return False
        return self._has_proved(peer) or self.is_anchor(peer)

    def is_anchor(self, peer: str) -> bool:
        """Whether the run trusts a peer (`trust`). The peer's own proof counts only where `proof_is_enough`."""
        if peer in self._barred:
            return False
        return self.is_named(peer) or (self.proof_is_enough and self._has_proved(peer))

    def is_named(self, peer: str) -> bool:
        """Whether the run names a peer as trusted: its reports about others count as well."""
        return peer not in self._barred and any(peer in peers for peers in self._trusted.values())

    def _has_proved(self, peer: str) -> bool:
        granted = self._granted.get(peer)
        return granted is not None and granted.trusted and not self.is_over(granted.until)

    def check(self, peer: str, method: str, access: Access) -> None:
        """Raise NotAdmitted unless a peer may call this method."""
        if self.allows(peer, access):
            return
        if peer in self._barred:
            raise NotAdmitted(f"peer {peer} is banned from this run: write to the owner of the run")
        if self.is_over(self.ends(peer)):
            raise NotAdmitted(
                f"the credential of {peer} has ended: renew it and introduce yourself with run.enter again"
            )
        role = "members" if access == "member" else "members and clients"
        raise NotAdmitted(f"{method} is for {role} of the run: introduce yourself with run.enter first")
