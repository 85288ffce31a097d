"""The answers to the coordinator's inquiry about the heads of all peers, and what a new term may begin from."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from peer.errors import ProtocolViolation, RoundDiscarded
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.branches import Branches
from swarm.protocol.agreement.rules.acceptor import forced_value
from swarm.protocol.agreement.rules.sponsors import Sponsors
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.head import Head, Member

ALONE_BACK_MAX: Final = 256  # heads that a coordinator takes back without the operator, where their weights are gone
REMEMBERED: Final = 8  # heads whose members a new term takes back in


@dataclass
class Inquiry:
    """One question to all peers about their heads."""

    nonce: str
    until: float
    by_operator: bool
    ready: bool = True
    """Whether enough members had answered before for it to end in a start (`GroupWatch.is_ready`)."""
    undo: bool = False
    """Whether the operator accepts that certified rounds are taken back."""
    overtaken: bool = False
    """Whether its cause is a head that a peer has sent, which follows the base of the present term."""
    told: dict[Member, msg.ReportMessage] = field(default_factory=dict)
    further: set[Member] = field(default_factory=set)
    """Peers that claim a head beyond those proved to this node."""


@dataclass(frozen=True)
class Base:
    """A head from which a term may begin."""

    head: Head
    undoes: tuple[bytes, ...]
    """Hashes of the heads that a start from it lists: those it takes back, then those that an earlier term has."""
    rounds: int
    """How many rounds it takes back."""
    peers: tuple[str, ...]
    """Peers that have answered from its branch."""

    def __str__(self) -> str:
        told_by = ", ".join(self.peers) or "no peer"
        return f"round {self.head.round} of term {self.head.term} with {told_by}: undoes {self.rounds}"


class InquiryResult:
    """The outcome of the answers to one inquiry."""

    def __init__(
        self,
        context: AgreementContext,
        chain: Chain,
        branches: Branches,
        inquiry: Inquiry,
        positions: Mapping[Member, msg.Position],
    ) -> None:
        """`positions`: what voters have reported since."""
        self._context, self._chain, self._branches = context, chain, branches
        self._me = context.config.peer
        self._by_operator, self._told, self._positions = inquiry.by_operator, inquiry.told, positions

    def goes_on(self) -> bool:
        """Return whether those that answered are a quorum of the present head and one of them holds its state."""
        head = self._chain.head
        return self._context.electorate.enough(head, set(self._told)) and bool(self.holders(head.state_hash))

    def unnamed(self, named: Collection[str]) -> tuple[str, ...]:
        """Return the members of the present head that did not answer and are not named; none if a quorum answered, as
        the others can then end no round without it."""
        head, answered = self._chain.head, {member.peer for member in self._told}
        if self._context.electorate.enough(head, set(self._told)):
            return ()
        return tuple(member.peer for member in head.members if member.peer not in answered.union(named))

    def holders(self, state_hash: bytes) -> set[Member]:
        """Return those that answered and hold that state. The coordinator is never a member."""
        holders = {member for member, told in self._told.items() if state_hash in told.holds}
        if state_hash == self._chain.head.state_hash:  # it may have been committed since they answered
            link, here = self._chain.link(self._chain.hash), position_of(self._chain.head)
            voted = {self._context.evidence.vote(signed).voter for signed in link.votes} if link is not None else set()
            holders |= {m for m in self._told if m in voted or self._positions.get(m) == here}
        return {member for member in holders if member.peer != self._me}

    def bases(self) -> list[Base]:
        """Return the heads from which a term may begin whose state a peer that answered holds, one of each branch, the
        one that goes furthest first; empty if there is none.

        The coordinator's own branch comes first of all while a peer holds a head of the last term in it that has ended
        a round: members of earlier terms may have left long ago, and can sign any number of rounds. By itself a
        coordinator goes back `ALONE_BACK_MAX` heads at most, and to no other branch."""
        own = list(self._branches.way_to(self._chain.goal))
        near = own if self._by_operator else own[:ALONE_BACK_MAX]
        mine = next((head for head in near if self.holders(head.state_hash)), None)
        last = self._branches.last_round(self._chain.goal)
        lives = mine is not None and (mine.term, mine.attempt >= 0) >= (last.term, last.attempt >= 0)
        found = {mine.hash: mine} if mine is not None else {}
        for told in self._told.values() if self._by_operator else ():
            head = self._branches.head(told.head)
            if head is not None and self.holders(head.state_hash) and (head.term >= last.term or not lives):
                found[told.head] = head
        ways = {name: set(self._branches.names_to(head)) for name, head in found.items()}
        tips = [head for name, head in found.items() if not any(name in ways[other] - {other} for other in found)]
        tips.sort(key=self._reached, reverse=True)
        shared = set.intersection(*(ways[head.hash] for head in tips)) if len(tips) > 1 else set()
        return [self._base(head, own, ways[head.hash], shared) for head in tips]

    def _reached(self, head: Head) -> tuple[int, msg.Position, msg.Position]:
        """Return how far a branch goes: by the last round that ended. A start may go on from one that may not have."""
        last = self._branches.last_round(head)
        return last.round, position_of(last), position_of(head)

    def _base(self, head: Head, own: Sequence[Head], way: set[bytes], shared: set[bytes]) -> Base:
        """Return a base with what a start from it takes back, also where that is only a value which may have been
        chosen. `way`: the hashes of the heads that led to it, `shared` with all other bases."""
        term, above = self._branches.last_round(head).term, self._branches.above(head, own)
        undone = [one.hash for one in above if one.term >= term]
        lost = [one.hash for one in above if one.term < term]  # listed, so that their members follow at once
        elsewhere = {told.head: one for told in self._told.values() if (one := self._branches.head(told.head))}
        for name, one in sorted(elsewhere.items()):
            value = self._accepted_after(one) if name not in way else None
            if value is not None:
                is_chosen = value.term >= term and self._may_be_chosen(value, one)
                (undone if is_chosen else lost).insert(0, value.hash)
        names = undone + lost[: max(0, msg.LINKS_MAX - 1 - len(undone))]
        peers = {member.peer for member, told in self._told.items() if told.head in way - shared} - {self._me}
        return Base(head, tuple(names[: msg.LINKS_MAX]), len(undone), tuple(sorted(peers)))

    def _may_be_chosen(self, value: Head, after: Head) -> bool:
        """Return whether those that have accepted a value, with those that have not answered, are a quorum."""
        others = {m for m, told in self._told.items() if told.accepted is None or told.accepted.value != value}
        return self._context.electorate.enough(after, set(self._context.electorate.voters(after)) - others)

    def chosen(self, head: Head) -> Head | None:
        """Return the value that may have been chosen after that head, if a peer that answered holds its state."""
        value = self._accepted_after(head)
        return value if value is not None and self.holders(value.state_hash) else None

    def _accepted_after(self, head: Head) -> Head | None:
        """Return the value that may have been chosen after that head."""
        name = head.hash
        found: list[msg.AcceptedValue] = []
        for member in sorted(self._told):
            told = self._told[member]
            if told.head != name or told.accepted is None or told.support is None:
                continue
            try:
                opened, _ = Succession(self._context).support(told.support, head, name)
            except (ProtocolViolation, RoundDiscarded):
                continue
            if opened.leads_to(told.accepted.value) and self._context.evidence.counts(told.accepted, head, name):
                found.append(told.accepted)
        highest = forced_value(found)
        return highest.value if highest is not None else None

    def members(self, base: Head, barred: frozenset[str]) -> tuple[set[Member], Sponsors]:
        """Return the members of a term that begins from `base`, and their sponsors: those that have earned it, answer
        and, in `required` mode, hold the state. Where one of them is left, also members of other groups that hold it;
        where none of them holds it, only these, or else newcomers that do."""
        holders = self.holders(base.state_hash)
        earned, sponsors = self.earned(base)
        present = holders if self._context.config.mode == "required" else set(self._told)
        members = (present & earned) | returned(holders, earned)
        found = {member for member in members if member.peer not in barred}
        others = {member for member in holders - members if self._context.work.is_known(member.peer)}
        if not members & holders:
            others = others or holders - members
        elif len(found) > 1:
            others = set()
        for member in sorted(others):
            if member.peer not in barred and self._takes_in(member, {one.peer for one in found}, sponsors):
                found.add(member)
        return found, sponsors

    def _takes_in(self, newcomer: Member, inside: set[str], sponsors: Sponsors) -> bool:
        """Return whether the run admits a newcomer beside those peers, and note its sponsors."""
        told = self._told[newcomer]
        mine = self._context.work.sponsors(msg.JoinBody(told.head, newcomer, told.credential), newcomer.peer)
        room = len(inside) < self._context.config.max_peers
        return mine is not None and room and sponsors.bring_in(newcomer.peer, mine, inside)

    def known(self, base: Head, members: set[Member]) -> int:
        """Return how many of these have earned it, in this incarnation or another one, here or in another group. The
        rest are newcomers."""
        earned = {member.peer for member in self.earned(base)[0]}
        return sum(member.peer in earned or self._context.work.is_known(member.peer) for member in members)

    def earned(self, base: Head) -> tuple[set[Member], Sponsors]:
        """Return the members of that head and of the few before it: one a peer, and no more of a sponsor than it may
        bring in. So a term that began with too few, or with liars, does not shut out the rest of the group."""
        found, sponsors = dict[str, Member](), Sponsors()
        for head in itertools.islice(self._branches.way_to(base), REMEMBERED):
            theirs = Sponsors(head.sponsored)
            for member in head.members:
                mine, room = theirs.of(member.peer), len(found) < self._context.config.max_peers
                if room and member.peer not in found and sponsors.bring_in(member.peer, mine, found):
                    found[member.peer] = member
        return set(found.values()), sponsors


def returned(holders: set[Member], members: set[Member]) -> set[Member]:
    """Return those holders of the state that are new incarnations of members: they have lost their votes, so they
    cannot vote after this head, but they can in a new term."""
    peers = {member.peer for member in members} - {member.peer for member in holders & members}
    return {member for member in holders if member.peer in peers}
