"""Branches: certified heads that are not on the coordinator's own chain.

Members that are cut off while the operator starts a new term continue the old one. They prove to the coordinator what
they have committed in it, page by page, while it asks all peers for their heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.records import LINKS_KEPT
from swarm.protocol.head import Head


class Branches:
    """The links of other branches, each proved from one that the coordinator has signed for, from its chain, or by most
    voters of where they left it."""

    def __init__(self, context: AgreementContext, chain: Chain) -> None:
        self._context, self._chain = context, chain
        self._links: dict[bytes, msg.ChainLink] = {}  # by hash of their head, in the order of proof

    @property
    def known(self) -> tuple[bytes, ...]:
        """Hashes of heads from which others may continue these branches, for `AskChainMessage`."""
        return tuple(self._links)[-msg.LINKS_MAX :]

    def learn(self, links: Iterable[msg.ChainLink]) -> bool:
        """Take proved heads into account; return whether any is new. Raises `ProtocolViolation` for a forged one."""
        new = False
        for link in links:
            name = link.head.hash
            if name in self._links or self._on_chain(name) is not None:
                continue
            if link.head.run_id != self._chain.head.run_id:
                continue
            if not (
                self._context.evidence.link_counts(link, self.head(link.head.previous))
                or self._chain.shown.by_most(name, self._chain.splits())
            ):
                continue  # the head before it is not proved to this node
            if self._is_second(link):
                break  # signed with keys of members that may have left since
            self._links[name] = link
            new = True
            while len(self._links) > LINKS_KEPT:
                del self._links[next(iter(self._links))]
        return new

    def _is_second(self, link: msg.ChainLink) -> bool:
        """Return whether another head has followed the same head by votes: a branch leaves the chain only where a new
        term was begun."""
        if link.start is not None:
            return False
        before = link.head.previous
        here = (name for name, other in self._links.items() if other.start is None and other.head.previous == before)
        return (self._chain.following(before) or next(here, link.head.hash)) != link.head.hash

    def head(self, name: bytes) -> Head | None:
        """Return the head of that hash, if it is proved to this node or on its chain."""
        link = self._links.get(name)
        return self._on_chain(name) if link is None else link.head

    def above(self, base: Head, heads: Sequence[Head]) -> list[bytes]:
        """Return the hashes of certified heads that a start from `base` takes back: those of the chain `heads` (the
        last one first) until it meets what led to `base`, then those of other branches. A start is no round."""
        kept = {head.hash for head in self.way_to(base)}
        own = itertools.takewhile(lambda head: head.hash not in kept, heads)
        others = (link.head for name, link in self._links.items() if name not in kept and self._on_chain(name) is None)
        return [head.hash for head in itertools.chain(own, others) if head.attempt >= 0]

    def overtake(self, start: Head) -> bool:
        """Return whether a branch continues by votes from the base of that start: the start came too late for it."""
        names = (link.head.previous for link in self._links.values() if link.start is None)
        return start.attempt < 0 and start.previous in names

    def way_to(self, base: Head) -> Iterator[Head]:
        """Return the head `base` and those that led to it, as far as they are known."""
        head: Head | None = base
        while head is not None:
            yield head
            head = self.head(head.previous)

    def _on_chain(self, name: bytes) -> Head | None:
        chain = self._chain
        if name == chain.hash:
            return chain.head
        link = chain.link(name)
        genesis = self._context.config.genesis
        return link.head if link is not None else genesis if name == genesis.hash else None
