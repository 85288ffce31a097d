"""The coordinator as a required voter: it knows all that was ever committed, so it starts a new term by itself.

It keeps (head, certificate) on disk and nothing else. A start is its own act, on disk before any other peer hears of
it: it then stands there and votes nowhere else, so a wrong suspicion costs a pause and never a second history.
"""

from __future__ import annotations

import itertools
from typing import Final

import msgspec

from peer.errors import ProtocolViolation
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.coordinator import RESTORED_JUMP, Coordinator, Inquiry, returned
from swarm.protocol.agreement.rules.sponsors import Sponsors
from swarm.protocol.head import Head, Member

DOUBLINGS_MAX: Final = 10
REMEMBERED: Final = 8  # heads
MANY: Final = 3  # members: of so many one alone is not the group any more


class RequiredCoordinator(Coordinator):
    """Mode B."""

    def __init__(self, context: AgreementContext, chain: Chain, applicants: Applicants) -> None:
        super().__init__(context, chain, applicants)
        self._ready = False
        self._fresh: set[Member] = set()  # members that have answered since this process began
        self._starts_in_vain = 0
        self._unheld_since: float | None = None
        self._last_round = -1
        self._without: frozenset[str] = frozenset()
        """Peers that a person left out. No start of this process takes them in again."""

    def poll(self) -> None:
        """Begin the group; ask who is there; start a new term where the group cannot go on."""
        first = self.first_members()
        if first:
            genesis = self.context.config.genesis
            self._start(genesis, genesis.hash, self.highest_term + 1, set(first), ())
            return
        if not self.chain.head.members or self.context.mute or self.inquiry is not None or self.is_over:
            return
        if not self._is_ready():
            if self._is_lost():
                self.tell_lost("too few members have answered since this process began: only a person can go on")
            self.inquire(self.highest_term + 1, seal=False, person=None)
        elif self._is_lost():
            self.tell_lost("too few members answer, or nothing was committed for long")
            self.inquire(self.highest_term + 1, seal=False, person=None)

    def told(self, peer: str, message: say.ToldMessage) -> None:
        super().told(peer, message)
        if message.nonce.startswith(f"{self.boot:x}."):
            self._fresh.add(message.voter)

    def shown(self, peer: str, links: tuple[say.ChainLink, ...]) -> None:
        """Stop, and call a person, at a vote or start of this node's own that its disk does not know: it is not the
        newest disk.

        One that leads on from this node's head is simply learned."""
        oldest = position_of(self.chain.ancestors()[-1])
        here = position_of(self.chain.head)
        for link in links:
            name, at = link.head.hash, position_of(link.head)
            signed = [s for s in (*link.votes, *filter(None, [link.start])) if s.signer == self.context.config.peer]
            unknown = name != self.chain.hash and not self.chain.is_past(name)
            if signed and unknown and oldest < at <= here and not self.context.mute:
                self._check_mine(link)
                self.set_mute(True)
                self.context.out.tell("coordinator_restored", round=link.head.round, term=link.head.term)

    def _check_mine(self, link: say.ChainLink) -> None:
        """Raise `ProtocolViolation` unless this node has really signed that head."""
        if link.start is not None:
            if self.context.evidence.start(link.start).head != link.head:
                raise ProtocolViolation("a start of term is for another head")
            return
        mine = [s for s in link.votes if s.signer == self.context.config.peer]
        votes = [self.context.evidence.vote(signed) for signed in mine]
        if any((vote.head, vote.value) != (link.head.previous, link.head.hash) for vote in votes):
            raise ProtocolViolation("a certificate has votes for another head")

    def committed(self) -> None:
        super().committed()
        self._unheld_since = None
        if self.chain.head.round > self._last_round:
            self._last_round, self._starts_in_vain = self.chain.head.round, 0

    def _is_ready(self) -> bool:
        """Return whether, since this process began, so many members of the newest head have answered that they meet
        every certificate: a disk that was put back from a backup is noticed before it starts a term."""
        head = self.chain.head
        needed = len(head.members) - self.context.electorate.members_needed(len(head.members)) + 1
        self._ready = self._ready or sum(member in self._fresh for member in head.members) >= needed
        return self._ready

    @property
    def _doubled(self) -> float:
        return float(2 ** min(self._starts_in_vain, DOUBLINGS_MAX))

    def _is_lost(self) -> bool:
        members = self.chain.head.members
        stood_s = self.context.now - max(self.began_at, self.committed_at)
        if stood_s < self.patient_s:
            return False
        heard = self.heard_within(self.patient_s)
        alive = sum(member in heard for member in members)
        stalled_s = max(self.context.config.stalled_s, 10.0 * self.round_s) * self._doubled
        too_few = alive < self.context.electorate.members_needed(len(members))
        came_back = stood_s > self.patient_s * self._doubled and self._leaves_out(heard)
        return too_few or came_back or stood_s > stalled_s

    def _leaves_out(self, heard: set[Member]) -> bool:
        """Return whether members answer that this term began without, though they stand at its first head: before
        its first round another start takes them in. Those that it began with may be too few, or liars, to end one."""
        head = self.chain.head
        absent = self._earned(head)[0] - set(head.members) if head.attempt < 0 else set()
        return any(self.is_held((member,)) for member in absent & heard if member.peer not in self._banned)

    @property
    def _banned(self) -> frozenset[str]:
        """Peers that a proof convicts or a person left out: no start takes them in."""
        return self._without.union(self.applicants.proofs)

    def ask(self, person: events.Asked) -> None:
        """Start a new term because a person says so."""
        term = self.highest_term + (RESTORED_JUMP if self.context.mute else 1)
        self._without = frozenset(person.without)
        self.inquire(term, seal=False, person=person)

    def decide(self, inquiry: Inquiry) -> None:
        """Start from the last head that this node certified, with those members that hold its state."""
        inquiry.told = {m: told for m, told in inquiry.told.items() if m.peer not in self._without}
        if not inquiry.by_person and (self.is_over or not self._is_ready() or not self._is_lost()):
            return
        if inquiry.by_person and not inquiry.without and self._goes_on:
            self.context.out.tell("regroup_withdrawn", round=self.chain.head.round, answered=len(inquiry.told))
            return
        held = self.last_held(inquiry)
        if held is None:
            reason = "no peer that answers holds a state of the run"
            self.context.out.tell("regroup_failed", round=self.chain.head.round, reason=reason)
            return
        base, undoes = held
        if undoes and not self._may_undo(inquiry, base):
            return
        self._unheld_since = None
        holders = self.state_holders(inquiry, base.state_hash)
        earned, sponsors = self._earned(base)
        members = (holders & earned) | returned(holders, earned) or holders
        members = {member for member in members if member.peer not in self._banned}
        if not members:
            reason = "each peer that answers with the state is left out, by a proof or by a person"
            self.context.out.tell("regroup_failed", round=base.round, reason=reason)
            return
        if not inquiry.by_person and len(members) == 1 and not self._may_be_left_alone(base):
            self.tell_lost("of three members or more one is left, which may lie: only a person can go on with it")
            return
        peers = {member.peer for member in members}
        sponsored = sponsors.among(peers)
        self._start(msgspec.structs.replace(base, sponsored=sponsored), base.hash, inquiry.term, members, undoes)

    @property
    def _goes_on(self) -> bool:
        """Whether this process has seen a commit within three rounds: a new term would only drop learners."""
        lately = self.committed_at > self.began_at and self.context.now - self.committed_at < self.patient_s
        return lately and not self._starts_in_vain and self._ready and not self.context.mute

    def _may_be_left_alone(self, base: Head) -> bool:
        """Return whether one member of the group at `base` may go on alone without a person's word. A cut that leaves
        the coordinator with one liar would give it the run. Starts that ended no round do not make a group smaller."""
        if self.context.config.lone_survivor or len(base.members) <= 1:
            return True
        heads = self.chain.ancestors()
        settled = next((head for head in heads if head.attempt >= 0 and head.round <= base.round), base)
        return len(settled.members) < MANY

    def _may_undo(self, inquiry: Inquiry, base: Head) -> bool:
        """Return whether certified heads may be taken back whose state no peer has brought: after a long time, or by
        a person. Only a person gives up all that was learned."""
        if inquiry.by_person:
            if not inquiry.undo:
                self.context.out.tell("regroup_undoes", round=self.chain.head.round)
            return inquiry.undo
        if base.round <= 0:
            self.tell_lost("no peer that answers has weights of the run")
            return False
        if self._unheld_since is None:
            self._unheld_since = self.context.now
        return self.context.now - self._unheld_since >= self.context.config.undo_s * self._doubled

    def _earned(self, base: Head) -> tuple[set[Member], Sponsors]:
        """Return the members of that head and of the few before it: one a peer, and no more of a sponsor than it may
        bring in. A term that too few began, or liars, is not all that a group comes back to."""
        found, sponsors = dict[str, Member](), Sponsors()
        heads = self.chain.ancestors()
        known = itertools.dropwhile(lambda head: head.hash != base.hash, heads)  # none where it is kept no more
        for head in itertools.islice(known, REMEMBERED):
            theirs = Sponsors(head.sponsored)
            for member in head.members:
                mine, room = theirs.of(member.peer), len(found) < self.context.config.max_peers
                if room and member.peer not in found and sponsors.have_room(member.peer, mine, found):
                    found[member.peer] = member
                    sponsors.add(member.peer, mine)
        return set(found.values()), sponsors

    def _start(
        self, base: Head, base_hash: bytes, term: int, members: set[Member], undoes: list[bytes] | tuple[()]
    ) -> None:
        head, signed = self.start_of(base, base_hash, max(term, self.highest_term + 1), members, undoes)
        self.set_mute(False)
        self._ready = True
        self._starts_in_vain += 1
        self.chain.learn([say.ChainLink(head, start=signed)])  # the node commits it to disk, then shows it to all
