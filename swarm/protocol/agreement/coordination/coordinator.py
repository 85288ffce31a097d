"""The coordinator's common part: it begins the group, follows its heads, vouches for them to newcomers and watches
its voters.

`witness_mode` and `required_mode` say when it starts a new term.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
from blake3 import blake3

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.branches import Branches
from swarm.protocol.agreement.records import RESTORED_KEY
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.sponsors import Sponsors
from swarm.protocol.head import Head, Member

TIMER: Final = "ask"
ENDORSED_EVERY: Final = 16  # rounds
ALONE_BACK_MAX: Final = 256  # heads that a coordinator takes back without a person, where their weights are gone
TOLD_AGAIN_S: Final = 600.0  # a lost quorum is told again: what a person saw in the morning may be forgotten
RESTORED_JUMP: Final = 1000  # terms, past all that the lost disk may have started
HEARD_MAX: Final = 4096


@dataclass
class Inquiry:
    """One question to all peers where they stand."""

    nonce: str
    until: float
    term: int
    by_person: bool
    seal: bool
    without: frozenset[str] = frozenset()
    undo: bool = False
    told: dict[Member, say.ToldMessage] = field(default_factory=dict)


class Coordinator(ABC):
    """What both modes share."""

    def __init__(self, context: AgreementContext, chain: Chain, applicants: Applicants) -> None:
        self.context, self.chain, self.applicants = context, chain, applicants
        self.branches = Branches(context, chain)
        self.boot = 0
        self.began_at = 0.0
        self.committed_at = 0.0
        self.round_s = 0.0
        self.inquiry: Inquiry | None = None
        self._heard: dict[Member, float] = {}
        self._positions: dict[Member, say.Position] = {}
        self._inquiries = 0
        self._told_lost = b""
        self._told_lost_at = 0.0

    # -- start ---------------------------------------------------------------------------------------------------------

    def load(self, event: events.Started) -> None:
        """Take over what the disk holds, and this process's boot id."""
        self.boot = int.from_bytes(blake3(event.session.encode()).digest()[:5], "big")
        self.began_at = self.committed_at = self.context.now
        self.context.mute = bool(event.records.get(RESTORED_KEY))
        if event.restored:
            self.set_mute(True)
        if self.context.mute:
            self.context.out.tell("coordinator_restored")

    def set_mute(self, mute: bool) -> None:
        """Wait for a person, or go on because of one. A restart in between changes nothing."""
        if mute != self.context.mute:
            self.context.mute = mute
            self.context.out.persist(RESTORED_KEY, b"1" if mute else b"")

    # -- what it hears -------------------------------------------------------------------------------------------------

    def status(self, message: say.StatusMessage) -> None:
        """Note that a peer answers."""
        if message.voter in self._heard or len(self._heard) < HEARD_MAX:
            self._heard[message.voter] = self.context.now
            self._positions[message.voter] = message.position
            self.chain.shown.heard(message.voter)

    def is_held(self, voters: Collection[Member]) -> bool:
        """Return whether one of these says that it stands at this node's head, or beyond."""
        return any(self._positions.get(voter, (0, 0, 0)) >= position_of(self.chain.head) for voter in voters)

    def heard_within(self, seconds: float) -> set[Member]:
        """Return the voters heard within that time."""
        return {member for member, at in self._heard.items() if self.context.now - at <= seconds}

    def told(self, peer: str, message: say.ToldMessage) -> None:
        """Take an answer to the present question, by a peer that stands no higher than what this node knows."""
        if message.voter.peer != peer:
            raise ProtocolViolation("an answer to the coordinator names another peer than its sender")
        self._heard[message.voter] = self.context.now
        inquiry = self.inquiry
        if inquiry is not None and message.nonce == inquiry.nonce and len(inquiry.told) < HEARD_MAX:
            for member in [m for m in inquiry.told if m.peer == peer]:
                del inquiry.told[member]  # a peer is one voter, in its latest incarnation
            inquiry.told[message.voter] = message
            if self.branches.head(message.head) is None:
                self.context.out.send(peer, say.AskChainMessage(self.branches.known))
            self._end_early()

    def _end_early(self) -> None:
        """End a person's question once all that are up have answered, and proved where they stand: a group that goes
        on meanwhile would overtake a start from what it has answered. Without a seal the question waits for more."""
        inquiry = self.inquiry
        if inquiry is None or not inquiry.seal:
            return
        answered = {member.peer for member in inquiry.told} | self.context.down
        proved = all(self.branches.head(told.head) is not None for told in inquiry.told.values())
        if proved and answered.issuperset(self.peers()):
            inquiry.until = self.context.now
            self.time()

    def shown(self, peer: str, links: tuple[say.ChainLink, ...]) -> None:
        """Look at heads that another peer shows, before the chain learns them. While a question is open, also those of
        other branches count, page by page."""
        if self.context.config.mode == "witness":
            self.chain.shown.note(peer, links)
        if self.inquiry is None:
            return
        if self.branches.learn(links) and len(links) > 1:
            self.context.out.send(peer, say.AskChainMessage(self.branches.known))
        self._end_early()

    def committed(self) -> None:
        """Note that this node stands at a new head. Of every few, vouch for it to those that were not there."""
        now, head = self.context.now, self.chain.head
        if head.attempt >= 0:  # how long a group stood before a start says nothing about its rounds
            self.round_s = now - self.committed_at
        self.committed_at = now
        if head.round % ENDORSED_EVERY == 0 and not self.context.mute:
            body = say.EndorsementBody(self.chain.hash)
            signed = self.context.signer.sign(evidence.ENDORSEMENT, body)
            self.chain.endorse(self.chain.hash, signed)
            for member in head.members:
                self.context.out.send(member.peer, say.EndorsementMessage(signed))

    @property
    def is_over(self) -> bool:
        """Whether the run is complete: its members leave, so that only a person starts another term."""
        said, rounds = self.context.work.is_over(), self.context.config.rounds
        return 0 < rounds <= self.chain.head.round and said is not False

    @property
    def patient_s(self) -> float:
        """Seconds without answers after which voters count as lost: three rounds, or the configured time if that is
        less."""
        config = self.context.config
        return min(config.lost_s, max(3.0 * self.round_s, 4.0 * config.poll_s))

    # -- asking --------------------------------------------------------------------------------------------------------

    def peers(self) -> list[str]:
        """Return all that may know something: members and learners, those before, and those heard or seen."""
        found: dict[str, None] = {}
        for head in self.chain.ancestors()[:8]:
            for member in (*head.members, *(learner.member for learner in head.learners)):
                found[member.peer] = None
        for member in self._heard:
            found[member.peer] = None
        found.update(self.context.known)
        found.pop(self.context.config.peer, None)
        return list(found)

    def inquire(self, term: int, seal: bool, person: events.Asked | None) -> None:
        """Ask all peers where they stand; `decide` follows."""
        config = self.context.config
        self._inquiries += 1
        self.inquiry = Inquiry(
            nonce=f"{self.boot:x}.{self._inquiries}",
            until=self.context.now + config.ask_s,
            term=term,
            by_person=person is not None,
            seal=seal,
            without=frozenset(person.without) if person is not None else frozenset(),
            undo=person is not None and person.undo,
        )
        self.context.out.timer(TIMER, self.inquiry.until)
        ask = say.AskMessage(self.inquiry.nonce, term, self.chain.hash, seal)
        for peer in self.peers():
            self.context.out.send(peer, ask)
        if seal:  # the witness is a voter as well
            self.context.out.send(config.peer, ask)

    def time(self) -> None:
        """End the present question when its time is over."""
        inquiry = self.inquiry
        if inquiry is not None and self.context.now >= inquiry.until:
            self.inquiry = None
            inquiry.told = {m: told for m, told in inquiry.told.items() if m.peer not in inquiry.without}
            if self.chain.head.members:
                self.decide(inquiry)
                return
            if self._may_begin(len(self.state_holders(inquiry, self.chain.head.state_hash))):
                self.set_mute(False)  # so many stand at the beginning, too
            self.not_begun()

    def not_begun(self) -> None:
        """Tell a person that there is nothing to go on from: the group begins once enough peers wait."""
        self.context.out.tell("regroup_failed", round=0, reason="the group has not begun")

    def show_start(self, message: say.StartMessage) -> None:  # noqa: B027 - a required one commits it first
        """Show a start of this node's own to its members, now that it is on disk, if it still is the right one."""

    @abstractmethod
    def poll(self) -> None:
        """Begin the group, and watch whether it can go on."""

    @abstractmethod
    def ask(self, person: events.Asked) -> None:
        """Start a new term because a person says so, if that is needed."""

    @abstractmethod
    def decide(self, inquiry: Inquiry) -> None:
        """Draw the conclusion from the answers."""

    # -- starts --------------------------------------------------------------------------------------------------------

    def first_members(self) -> tuple[Member, ...]:
        """Return the members with which the group may begin now; empty while too few wait."""
        if self.chain.head.members or self.context.mute:
            return ()
        waiting = self.applicants.first()[0][: self.context.config.max_peers]
        return waiting if self._may_begin(len(waiting)) else ()

    def _may_begin(self, waiting: int) -> bool:
        """Return whether the group may begin with so many members."""
        said = self.context.work.may_begin(waiting) if waiting else False
        return waiting >= self.context.config.min_peers if said is None else said

    def start_of(
        self, base: Head, base_hash: bytes, term: int, members: Iterable[Member], undoes: Collection[bytes] = ()
    ) -> tuple[Head, Signed]:
        """Return the first head of a term over the state of `base`, and its signed start."""
        chosen = tuple(sorted(members))
        sponsors = Sponsors(base.sponsored) if base.members else self.applicants.first()[1]
        head = msgspec.structs.replace(
            self.context.work.fast_forward(base),
            term=term,
            boot=self.boot,
            previous=base_hash,
            members=chosen,
            witness=self.context.me,
            learners=(),
            absent=(),
            sponsored=sponsors.among({member.peer for member in chosen}),
            attempt=-1,
        )
        body = say.StartBody(head, tuple(undoes)[: say.LINKS_MAX])
        self.context.out.tell("regrouped", term=term, round=head.round, members=len(chosen), undone=len(undoes))
        return head, self.context.signer.sign(evidence.START, body)

    def state_holders(self, inquiry: Inquiry, state_hash: bytes) -> set[Member]:
        """Return those that answered and hold that state. The coordinator is never a member."""
        holders = {member for member, told in inquiry.told.items() if state_hash in told.holds}
        if state_hash == self.chain.head.state_hash:  # it may have been committed since they answered
            link, here = self.chain.link(self.chain.hash), position_of(self.chain.head)
            voted = {self.context.evidence.vote(signed).voter for signed in link.votes} if link is not None else set()
            holders |= {m for m in inquiry.told if m in voted or self._positions.get(m) == here}
        return {member for member in holders if member.peer != self.context.config.peer}

    def last_held(self, inquiry: Inquiry) -> tuple[Head, list[bytes]] | None:
        """Return the furthest certified head whose state a peer that answered holds, and the hashes of the heads that a
        start from there takes back. For a person it may be of another branch, where a peer that answered stands and
        proves it, or the first of all. By itself a coordinator goes back only so far."""
        own = self.chain.ancestors()
        near = own if inquiry.by_person else own[:ALONE_BACK_MAX]
        found = [head for head in near if self.state_holders(inquiry, head.state_hash)][:1]
        for told in inquiry.told.values() if inquiry.by_person else ():
            head = self.branches.head(told.head)
            if head is not None and self.state_holders(inquiry, head.state_hash):
                found.append(head)
        if not found:
            return None
        base = max(found, key=lambda head: (head.round, position_of(head)))
        return base, self.branches.above(base, own)

    def tell_lost(self, reason: str) -> None:
        """Tell a person that the group cannot go on: once for each head, and again after `TOLD_AGAIN_S`. `alone`: no
        member answers, so it may be this machine's own connection that is lost."""
        head, now = self.chain.head, self.context.now
        if self._told_lost == self.chain.hash and now - self._told_lost_at < TOLD_AGAIN_S:
            return
        self._told_lost, self._told_lost_at = self.chain.hash, now
        away = [m.peer for m in head.members if m not in self.heard_within(self.patient_s)]
        alone = len(away) == len(head.members)
        self.context.out.tell("quorum_lost", round=head.round, reason=reason, away=tuple(away), alone=alone)

    @property
    def highest_term(self) -> int:
        """The highest term that this node has seen; the next start has a higher one."""
        return max(position_of(self.chain.head)[0], 0)


def returned(holders: set[Member], members: set[Member]) -> set[Member]:
    """Return those holders of the state that are new incarnations of members: they came back without their disk's
    votes, so they could not vote here, but they can in a new term."""
    peers = {member.peer for member in members} - {member.peer for member in holders & members}
    return {member for member in holders if member.peer in peers}
