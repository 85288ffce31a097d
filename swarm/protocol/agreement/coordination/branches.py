"""Branches: certified heads that are not on the coordinator's own chain.

Members that are cut off while the operator starts a new term continue the old one. They prove their commits in it to
the coordinator, page by page, while it asks all peers for their heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.links import KeptLinks
from swarm.protocol.head import Head


class Branches:
    """The links of other branches, each proved from one that the coordinator has signed for, from its chain, or by most
    voters of where they left it."""

    def __init__(self, context: AgreementContext, chain: Chain) -> None:
        self._context, self._chain = context, chain
        self._genesis, self._genesis_hash = context.config.genesis, context.config.genesis.hash
        self.chosen: dict[bytes, Head] = {}
        """Values from which starts began since they may have been chosen, by hash: no votes for them were known."""
        self._links = KeptLinks()  # by hash of their head, in the order of proof

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
            self._links.keep(name, link)
            new = True
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

    def above(self, base: Head, heads: Sequence[Head]) -> list[Head]:
        """Return the certified rounds that a start from `base` takes back, the last one first: those of the chain
        `heads` (the last one first) until it meets what led to `base`, and those of other branches."""
        kept = set(self.names_to(base))
        own = itertools.takewhile(lambda head: head.hash not in kept, heads)
        others = (link.head for name, link in self._links.items() if name not in kept and self._on_chain(name) is None)
        return sorted(filter(self._is_round, (*own, *others)), key=position_of, reverse=True)

    def overtake(self, start: msg.StartBody) -> bool:
        """Return whether a start came too late for a branch: it takes back a round of it without listing that
        (`Chain.takes_back`), and no round of a higher term has ended since."""
        kept = {*self.names_to(start.head), start.head.previous, *start.undoes}
        term = self.last_round(start.head).term
        return any(
            link.head.attempt >= 0 and link.head.term >= term and link.head.round >= start.head.round
            for name, link in self._links.items()
            if name not in kept
        )

    def last_round(self, head: Head) -> Head:
        """Return the last certified round that led to `head`, or the first head: through starts, and through a value
        from which one began since it may have been chosen."""
        return next(filter(self._is_round, self.way_to(head)), self._genesis)

    def _is_round(self, head: Head) -> bool:
        return head.attempt >= 0 and self.head(head.hash) is not None

    def way_to(self, base: Head) -> Iterator[Head]:
        """Return the head `base` and those that led to it, as far as they are known."""
        head: Head | None = base
        while head is not None:
            yield head
            head = self.head(head.previous) or self.chosen.get(head.previous)

    def names_to(self, base: Head) -> Iterator[bytes]:
        """Return the hashes of these, without hashing all of them."""
        name = base.hash
        for head in self.way_to(base):
            yield name
            name = head.previous

    def _on_chain(self, name: bytes) -> Head | None:
        chain = self._chain
        if name == chain.hash:
            return chain.head
        link = chain.link(name)
        return link.head if link is not None else self._genesis if name == self._genesis_hash else None
