"""Heads that most voters of one of the coordinator's heads have sent, when the links to them are no longer kept.

A witness that was away for longer than links are kept finds its group again by these. They prove as much as the links
would: in `witness` mode the same keys could have signed all of those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peer.bounds import Latest
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.records import LINKS_KEPT
from swarm.protocol.head import Head, Member

VOTERS_MAX: Final = 4096


class ShownHeads:
    """The heads that each voter has sent to a witness."""

    def __init__(self) -> None:
        self._voters: dict[str, Member] = {}  # the latest incarnation of each peer
        self._by: Latest[bytes, set[Member]] = Latest(LINKS_KEPT)  # by hash of the head

    def heard(self, voter: Member) -> None:
        """Note the present incarnation of a peer."""
        if voter.peer in self._voters or len(self._voters) < VOTERS_MAX:
            self._voters[voter.peer] = voter

    def note(self, peer: str, links: Iterable[ChainLink]) -> None:
        """Note the links that a peer sends as its chain."""
        voter = self._voters.get(peer)
        if voter is None:
            return
        for link in links:
            self._by.setdefault(link.head.hash, set()).add(voter)

    def by_most(self, name: bytes, heads: Iterable[Head]) -> bool:
        """Return whether a majority of the members of one of these heads has sent that one."""
        shown_by = self._by.get(name, set())
        return any(len(shown_by.intersection(head.members)) >= head.quorum for head in heads if head.members)
