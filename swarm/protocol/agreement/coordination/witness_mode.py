"""The coordinator as a witness: the group goes on without it, and only a person starts a new term.

A seal is tried first. Where a quorum answers, the members go on by themselves. Else the start begins from the highest
certified head, or from a value that may have been chosen after it.
"""

from __future__ import annotations

import msgspec

from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation, RoundDiscarded
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.coordinator import RESTORED_JUMP, Coordinator, Inquiry, returned
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import COORDINATOR_KEY, CoordinatorRecord
from swarm.protocol.agreement.rules.acceptor import NEVER, forced_value
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.head import Head, Member


class WitnessCoordinator(Coordinator):
    """The coordinator of `witness` mode."""

    def __init__(self, context: AgreementContext, chain: Chain, applicants: Applicants) -> None:
        super().__init__(context, chain, applicants)
        self._record = CoordinatorRecord(0)
        self._started_at = 0.0
        self._told_open = False
        self._offered = 0  # the round at which a person was told that the run could go on, with what is undone

    def load(self, event: events.Started) -> None:
        super().load(event)
        try:
            self._record = msgspec.msgpack.decode(event.records.get(COORDINATOR_KEY, b""), type=CoordinatorRecord)
        except MALFORMED:
            self._record = CoordinatorRecord(0)
        if event.restored:
            self._record = CoordinatorRecord(self._record.term, None)
        if self._open is not None:
            self.context.left = max(self.context.left, self._open.term)

    @property
    def highest_term(self) -> int:
        return max(super().highest_term, self._record.term)

    @property
    def _open(self) -> Head | None:
        """The first head of a start that is not bound yet."""
        if self._record.start is None:
            return None
        head = self.context.evidence.start(self._record.start).head
        return head if position_of(head) > position_of(self.chain.head) else None

    @property
    def _takes_back(self) -> bool:
        """Whether the open start takes back what this node has heard of since."""
        signed = self._record.start
        return signed is not None and self.chain.takes_back(self.context.evidence.start(signed))

    def poll(self) -> None:
        """Begin the group; send an open start again; tell of a lost quorum."""
        opened = self._open
        if opened is not None:
            if self.inquiry is None:
                self._send_start()
            lasts_s = self.context.now - self._started_at
            vain = self._takes_back or lasts_s > self.context.config.start_s
            if vain and not self._told_open:
                self._told_open = True
                self.context.out.tell("start_not_bound", term=opened.term, members=len(opened.members))
            return
        first = self.first_members()
        if first:
            genesis = self.context.config.genesis
            self._start(genesis, genesis.hash, self.highest_term + 1, set(first), ())
            return
        head, now = self.chain.head, self.context.now
        if not head.members or self.is_over or now - self.began_at < self.patient_s:
            return
        alive = self.heard_within(self.patient_s) | {self.context.me}
        if not self.context.electorate.enough(head, alive):
            self.tell_lost("too few voters answer")
        elif now - self.committed_at > self.patient_s and not self.is_held(alive):
            self.tell_lost("no peer that answers has the state of the last head")  # it went with a disk

    def ask(self, person: events.Asked) -> None:
        """Start a new term because a person says so: seal first."""
        if not (self.chain.head.members or self.context.mute or self._told_open):
            self.not_begun()
            return
        term = self.highest_term + (RESTORED_JUMP if self.context.mute else 1)
        self._keep(CoordinatorRecord(term, self._record.start))  # which may have been bound, as far as this node knows
        self.inquire(term, seal=True, person=person)

    def not_begun(self) -> None:
        super().not_begun()
        if self._told_open:  # its voters are gone, as far as a person can tell: another first start may follow
            self._keep(CoordinatorRecord(self.highest_term))

    def decide(self, inquiry: Inquiry) -> None:
        """Withdraw where a quorum answers; else start from the highest head that counts and that a peer holds."""
        head, out = self.chain.head, self.context.out
        answered = {member for member, told in inquiry.told.items() if told.promised < NEVER}
        holders = self.state_holders(inquiry, head.state_hash)
        goes_on = self.context.electorate.enough(head, answered) and holders
        if goes_on and not self.context.mute and self._open is None:
            out.tell("regroup_withdrawn", round=head.round, answered=len(answered))
            return
        held = self.last_held(inquiry)
        if held is None:
            out.tell("regroup_failed", round=head.round, reason="no peer that answers holds a state of the run")
            return
        base, undoes = held
        if undoes and (not inquiry.undo or base.round < self._offered):  # a person has agreed to no more than that
            self._offered = base.round
            out.tell("regroup_undoes", round=head.round, goes_on_at=base.round)
            return
        self._offered = 0
        if not undoes:
            chosen = self._chosen(inquiry)
            if chosen is not None:
                base = chosen
        self._begin_from(base, inquiry, undoes)

    def _chosen(self, inquiry: Inquiry) -> Head | None:
        """Return the value that may have been chosen after this node's head, if a peer that answered holds its
        state."""
        head, name = self.chain.head, self.chain.hash
        found: list[say.AcceptedValue] = []
        for member in sorted(inquiry.told):
            told = inquiry.told[member]
            if told.head != name or told.accepted is None or told.support is None:
                continue
            try:
                opened, _ = Succession(self.context).support(told.support, head, name)
            except (ProtocolViolation, RoundDiscarded):
                continue
            if opened.leads_to(told.accepted.value) and self.context.evidence.counts(told.accepted, head, name, NEVER):
                found.append(told.accepted)
        highest = forced_value(found)
        if highest is None or not self.state_holders(inquiry, highest.value.state_hash):
            return None
        return highest.value

    def _begin_from(self, base: Head, inquiry: Inquiry, undoes: list[bytes]) -> None:
        inside = {*base.members, *self.chain.head.members}
        holders = self.state_holders(inquiry, base.state_hash)
        members = {member for member in inquiry.told if member in inside}
        members |= returned(holders, inside)
        if not members & holders:
            members |= set(sorted(holders)[:1])
        self._start(base, base.hash, inquiry.term, members, undoes)

    def _start(
        self, base: Head, base_hash: bytes, term: int, members: set[Member], undoes: list[bytes] | tuple[()]
    ) -> None:
        _, signed = self.start_of(base, base_hash, term, members, undoes)
        self.set_mute(False)
        self.context.left = max(self.context.left, term)  # what it has started is all that it stands for
        self._keep(CoordinatorRecord(term, signed))
        self._started_at, self._told_open = self.context.now, False
        self._send_start()

    def _send_start(self) -> None:
        """Send the open start to this node itself, which shows it to the others once it is on disk."""
        if self._record.start is not None:
            self.context.out.send(self.context.config.peer, say.StartMessage(self._record.start))

    def show_start(self, message: say.StartMessage) -> None:
        if self._open is not None and message.start == self._record.start and not self._takes_back:
            for member in self._open.members:
                self.context.out.send(member.peer, message)

    def _keep(self, record: CoordinatorRecord) -> None:
        if record != self._record:
            self._record = record
            self.context.out.persist(COORDINATOR_KEY, encode(record))
