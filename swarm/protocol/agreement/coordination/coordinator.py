"""The coordinator: it begins the group, follows its heads, vouches for them to newcomers, watches its voters and starts
new terms.

It signs the first head of each term, the start, and writes it to disk before it sends it; from then on it votes after
that head only. The mode says who may ask for a start. A required coordinator has completed every certificate, so it
acts by itself, and a wrong suspicion costs a pause. A witness may have missed rounds, so only the operator asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from blake3 import blake3

from peer.catalogue.groups import CoordinatorRestored, Regrouped
from peer.errors import ProtocolViolation
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.branches import Branches
from swarm.protocol.agreement.coordination.group_watch import HEARD_MAX, GroupWatch
from swarm.protocol.agreement.coordination.inquiry import REMEMBERED, Base, Inquiry, InquiryResult
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import (
    CHOSEN_KEPT,
    OPERATOR_KEY,
    RESTORED_KEY,
    OperatorRecord,
    operator_record,
)
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Head, Member, Sponsorship

TIMER: Final = "ask"
ASK_EVERY_S: Final = 0.5
ENDORSED_EVERY: Final = 16  # rounds
RESTORED_JUMP: Final = 1000  # terms, past all that the lost disk may have started


class Coordinator:
    """The coordinator's part in one group."""

    def __init__(self, context: AgreementContext, chain: Chain, applicants: Applicants) -> None:
        self._context, self._chain, self._applicants = context, chain, applicants
        self._branches = Branches(context, chain)
        self.watch = GroupWatch(context, chain)
        self._boot = 0
        self.inquiry: Inquiry | None = None
        self._inquiries = 0
        self._operator = events.RegroupRequested()  # the last one
        self._kept = self._before = OperatorRecord()  # now, and before that request
        self._offered: int | None = None  # the round to which the operator was told that the run can go back

    # -- start ---------------------------------------------------------------------------------------------------------

    def load(self, event: events.Started) -> None:
        """Take over what the disk holds, and this process's boot id."""
        self._boot = int.from_bytes(blake3(event.session.encode()).digest()[:5], "big")
        self.watch.begin()
        self._kept = operator_record(event.records)
        self._branches.chosen = {head.hash: head for head in self._kept.chosen}
        self._context.mute = bool(event.records.get(RESTORED_KEY))
        if event.restored:
            self._set_mute(True)
        if self._context.mute:
            self._context.out.emit(CoordinatorRestored())

    def woke(self) -> None:
        """Note that this process was frozen for some time: judge nothing before other peers have answered again."""
        self.watch.woke()
        if self.inquiry is not None:
            self.inquiry.until = self._context.now + self._context.config.ask_s
            self._ask(self.inquiry)

    def _set_mute(self, mute: bool) -> None:
        """Wait for the operator, or no longer. A restart in between changes nothing."""
        if mute != self._context.mute:
            self._context.mute = mute
            self._context.out.persist(RESTORED_KEY, b"1" if mute else b"")

    def _keep(self, kept: OperatorRecord) -> None:
        """Keep on disk, before any start that follows, what the operator and this node have decided."""
        self._branches.chosen = {head.hash: head for head in kept.chosen}
        if kept != self._kept:
            self._kept = kept
            self._context.out.persist(OPERATOR_KEY, encode(kept))

    # -- what it receives ----------------------------------------------------------------------------------------------

    def status(self, message: msg.StatusMessage) -> None:
        """Note that a peer answers."""
        self.watch.heard(message.voter, message.position)
        self._chain.shown.heard(message.voter)

    def told(self, peer: str, message: msg.ReportMessage) -> None:
        """Take an answer to the present inquiry from a peer whose head is no higher than those proved to this node."""
        if message.voter.peer != peer:
            raise ProtocolViolation("an answer to the coordinator names another peer than its sender")
        self.watch.answered(message.voter, message.nonce.startswith(f"{self._boot:x}."))
        inquiry = self.inquiry
        if inquiry is not None and message.nonce == inquiry.nonce and len(inquiry.told) < HEARD_MAX:
            for member in [m for m in inquiry.told if m.peer == peer]:
                del inquiry.told[member]  # a peer is one voter, in its latest incarnation
            inquiry.told[message.voter] = message
            inquiry.further.discard(message.voter)
            if self._branches.head(message.head) is None:
                self._context.out.send(peer, msg.AskChainMessage(self._branches.known))
            self.end_early()

    def told_further(self, peer: str, message: msg.ReportMessage) -> None:
        """Note an answer from a head that is not proved to this node yet."""
        if message.voter.peer != peer:
            raise ProtocolViolation("an answer to the coordinator names another peer than its sender")
        inquiry = self.inquiry
        if inquiry is not None and message.nonce == inquiry.nonce and len(inquiry.further) < HEARD_MAX:
            inquiry.further.add(message.voter)

    def end_early(self) -> None:
        """End the operator's inquiry once all peers that are up have answered and proved their heads: a group that
        commits meanwhile would overtake the start. The coordinator's own inquiry lasts its full time."""
        inquiry = self.inquiry
        if inquiry is None or not inquiry.by_operator:
            return
        answered = {member.peer for member in inquiry.told} | self._context.down
        proved = all(self._branches.head(told.head) is not None for told in inquiry.told.values())
        if proved and answered.issuperset(self.peers()):
            inquiry.until = self._context.now
            self.time()

    def shown(self, peer: str, links: tuple[msg.ChainLink, ...]) -> None:
        """Check heads that another peer sends, before the chain takes them. During an inquiry those of other branches
        count too, page by page; so do those that follow the base of a term which has ended no round yet."""
        if self._context.config.mode == "witness":
            self._chain.shown.note(peer, links)
        self._stop_at_unknown(links)
        fresh = self._chain.head.attempt < 0 and self._chain.head.members and not self._context.mute
        if self.inquiry is None and not fresh:
            return
        if self._branches.learn(links) and len(links) > 1:
            self._context.out.send(peer, msg.AskChainMessage(self._branches.known))
        quiet = self.inquiry is None and self._offered is None and peer not in self._kept.without
        if quiet and self._is_overtaken():
            self._inquire(by_operator=True, overtaken=True)

    def _is_overtaken(self) -> bool:
        """Return whether the present start came too late for a branch that is proved to this node."""
        link = self._chain.link(self._chain.hash)
        if link is None or link.start is None:
            return False
        return self._branches.overtake(self._context.evidence.start(link.start))

    def _stop_at_unknown(self, links: tuple[msg.ChainLink, ...]) -> None:
        """Stop, and alert the operator, at a head that this node has signed for and that its disk does not hold: that
        is not the newest. Later ones are accepted, except a first start, a second one of the present term's number, and
        one after this process has seen commits: then another process has this node's key."""
        oldest, head = position_of(self._chain.ancestors()[-1]), self._chain.head
        for link in links:
            name, at = link.head.hash, position_of(link.head)
            votes = link.votes if self._context.config.mode == "required" else ()
            bodies = (*votes, *filter(None, (link.start, link.endorsement)))
            signed = [body for body in bodies if body.signer == self._context.config.peer]
            unknown = name != self._chain.hash and not self._chain.is_past(name)
            second = not head.members or (link.head.term == head.term and link.head.boot != head.boot)
            another = link.start is not None and link.head.boot != self._boot and self.watch.has_seen_commits
            stops = oldest < at <= position_of(head) or second or (another and oldest < at)
            if signed and unknown and stops and not self._context.mute:
                self._context.evidence.require_signed_by(self._context.config.peer, link)
                self._set_mute(True)
                self._context.out.emit(CoordinatorRestored(round=link.head.round, term=link.head.term))

    def committed(self) -> None:
        """Note that this node is at a new head. Endorse every sixteenth, so that newcomers may begin at it."""
        self.watch.committed()
        head = self._chain.head
        if head.round % ENDORSED_EVERY == 0 and not self._context.mute:
            body = msg.EndorsementBody(self._chain.hash)
            signed = self._context.signer.sign(evidence.ENDORSEMENT, body)
            self._chain.endorse(self._chain.hash, signed)
            for member in head.members:
                self._context.out.send(member.peer, msg.EndorsementMessage(signed))

    @property
    def is_over(self) -> bool:
        """Whether the run is complete: its members leave, so that only the operator starts another term."""
        said, rounds = self._context.work.is_over(), self._context.config.rounds
        return 0 < rounds <= self._chain.head.round and said is not False

    # -- asking --------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Begin the group; check whether it can continue, and if not, start an inquiry where the mode allows that."""
        first = self._first_members()
        if first:
            genesis = self._context.config.genesis
            self._start(genesis, set(first), self._applicants.first()[1].among({member.peer for member in first}))
            return
        if not self._chain.head.members or self._context.mute or self.inquiry is not None or self.is_over:
            return
        lost, acts = self.watch.lost(self._barred), self._context.config.mode == "required"
        if lost:
            self.watch.tell_lost(lost)
        if acts and (lost or not self.watch.is_ready):
            self._inquire(by_operator=False)

    def ask(self, operator: events.RegroupRequested) -> None:
        """Start a new term at the operator's request, if that is needed."""
        if not (self._chain.head.members or self._context.mute):
            self._not_begun()
            return
        self._operator, self._before = operator, self._kept
        excluded = (*self._kept.without, *operator.without)
        without = tuple(peer for peer in dict.fromkeys(excluded) if peer not in operator.readmit)
        self._keep(msgspec.structs.replace(self._kept, without=without))
        self._inquire(by_operator=True)

    @property
    def _barred(self) -> frozenset[str]:
        """Peers that a proof convicts or the operator left out: no start takes them in."""
        return frozenset(self._kept.without).union(self._applicants.proofs)

    def peers(self) -> list[str]:
        """Return all peers to ask: those of the last heads, and others that have sent something or were seen."""
        found: dict[str, None] = {}
        for head in self._chain.ancestors()[:REMEMBERED]:
            for member in (*head.members, *(learner.member for learner in head.learners)):
                found[member.peer] = None
        found.update(dict.fromkeys(self.watch.peers))
        found.update(self._context.known)
        found.pop(self._context.config.peer, None)
        return list(found)

    def _inquire(self, by_operator: bool, overtaken: bool = False) -> None:
        """Ask all peers for their heads; `_decide` follows."""
        config = self._context.config
        self._inquiries += 1
        nonce = f"{self._boot:x}.{self._inquiries}"
        undo = by_operator and self._operator.undo
        ready = by_operator or self.watch.is_ready
        self.inquiry = Inquiry(nonce, self._context.now + config.ask_s, by_operator, ready, undo, overtaken)
        self._ask(self.inquiry)

    def _ask(self, inquiry: Inquiry) -> None:
        """Ask all that have not answered, and again after `ASK_EVERY_S`: a message may be lost."""
        config, out = self._context.config, self._context.out
        ask, answered = msg.AskMessage(inquiry.nonce, self._chain.hash), {member.peer for member in inquiry.told}
        peers = [*self.peers(), *([config.peer] if config.mode == "witness" else [])]  # a voter as well
        for peer in peers:
            if peer not in answered:
                out.send(peer, ask)
        out.timer(TIMER, min(inquiry.until, self._context.now + ASK_EVERY_S))

    def time(self) -> None:
        """End the present inquiry when its time is over; until then ask again."""
        inquiry = self.inquiry
        if inquiry is not None and self._context.now < inquiry.until:
            self._ask(inquiry)
        elif inquiry is not None:
            self.inquiry = None
            inquiry.told = {m: told for m, told in inquiry.told.items() if m.peer not in self._kept.without}
            answers = InquiryResult(self._context, self._chain, self._branches, inquiry, self.watch.positions)
            if self._chain.head.members:
                self._decide(inquiry, answers)
                return
            if self._may_begin(len(answers.holders(self._chain.head.state_hash))):
                self._set_mute(False)  # as many as may begin the group are at its first head
            self._not_begun()

    def _not_begun(self) -> None:
        """Report that the group has not begun, so it cannot be continued: it begins once enough peers wait."""
        self._fail(0, "the group has not begun")

    def _fail(self, round: int, reason: str, away: tuple[str, ...] = ()) -> None:
        self._context.out.emit("regroup_failed", round=round, reason=reason, **({"away": away} if away else {}))

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, inquiry: Inquiry, answers: InquiryResult) -> None:
        """Start from the furthest certified head whose state a peer holds, with the members that answer."""
        head = self._chain.head
        if not inquiry.by_operator and (self.is_over or not inquiry.ready or not self.watch.lost(self._barred)):
            return
        asked = inquiry.by_operator and not inquiry.overtaken
        if asked and self._goes_on(answers):
            self._context.out.emit("regroup_withdrawn", round=head.round, answered=len(inquiry.told))
            return
        if asked and self._operator.all_named and (away := answers.unnamed(self._kept.without)):
            self._keep(msgspec.structs.replace(self._kept, without=self._before.without))  # nothing was done
            self._fail(head.round, f"members do not answer that were not named: {', '.join(away)}", away)
            return
        bases = answers.bases()
        if not bases:
            self._fail(head.round, "no peer that answers holds a state of the run")
            return
        found, base = bases[0], bases[0].head
        if inquiry.overtaken and (base == self._chain.goal or inquiry.further.intersection(head.members)):
            return  # the peer that has sent later heads does not answer, or the present term may have ended a round
        if found.rounds and not self._may_undo(inquiry, bases):
            return
        if inquiry.by_operator and not found.rounds and self._context.config.mode == "witness":
            base = answers.chosen(base) or base
        self.watch.held()
        members, sponsors = answers.members(base, self._barred)
        if not members:
            self._fail(base.round, "a proof, the operator or a used invite bars each peer that answers with the state")
        elif not inquiry.by_operator and (doubt := self._doubt(base, answers.known(base, members))):
            self.watch.tell_lost(f"{doubt}: only the operator can go on")
        else:
            if base != found.head:
                chosen = (*self._kept.chosen, base)[-CHOSEN_KEPT:]
                self._keep(msgspec.structs.replace(self._kept, chosen=chosen))
            self._start(base, members, sponsors.among({member.peer for member in members}), found)

    def _doubt(self, base: Head, known: int) -> str:
        """Return why this node by itself starts no term from `base` with that many known members; empty if it may."""
        if known > 1 or self.watch.trusts_few(self._branches.way_to(base)):
            return ""
        left = "one is left, which" if known else "none is left, and newcomers"
        return f"of three members or more {left} may lie"

    def _goes_on(self, answers: InquiryResult) -> bool:
        """Return whether the group continues without a new term, which would only cost it its learners: in `required`
        mode after a recent commit, in `witness` mode if a quorum answers and has committed not too long ago."""
        if self._context.mute:
            return False
        if self._context.config.mode == "required":
            return not self._operator.without and self.watch.goes_on
        return answers.goes_on() and not self.watch.stands

    def _may_undo(self, inquiry: Inquiry, bases: Sequence[Base]) -> bool:
        """Return whether certified heads may be undone whose state no peer has brought: after a long time, or if the
        operator agrees, and no further than was announced. Only the operator can go back to the first head."""
        base = bases[0].head
        if not inquiry.by_operator:
            return self.watch.may_undo(base)
        if inquiry.undo and self._offered is not None and base.round >= self._offered:
            return True
        self._offered = base.round
        told = {"round": self._chain.head.round, "goes_on_at": base.round, "undone": bases[0].rounds}
        branches = tuple(map(str, bases)) if len(bases) > 1 else ()
        self._context.out.emit("regroup_undoes", **told, branches=branches)
        return False

    # -- starts --------------------------------------------------------------------------------------------------------

    def _first_members(self) -> tuple[Member, ...]:
        """Return the members with which the group may begin now; empty while too few wait."""
        if self._chain.head.members or self._context.mute or self.watch.up_s < self._context.config.begin_s:
            return ()
        waiting = self._applicants.first()[0][: self._context.config.max_peers]
        return waiting if self._may_begin(len(waiting)) else ()

    def _may_begin(self, waiting: int) -> bool:
        """Return whether the group may begin with this number of members."""
        said = self._context.work.may_begin(waiting) if waiting else False
        return waiting >= self._context.config.min_peers if said is None else said

    def _start(
        self,
        base: Head,
        members: Iterable[Member],
        sponsored: tuple[Sponsorship, ...],
        found: Base | None = None,
    ) -> None:
        """Sign the first head of a new term with the state of `base`, and move to it. `found`: what it takes back."""
        jump = RESTORED_JUMP if self._context.mute else 1
        head = msgspec.structs.replace(
            self._context.work.fast_forward(base),
            term=max(position_of(self._chain.head)[0], 0) + jump,
            boot=self._boot,
            previous=base.hash,
            members=tuple(sorted(members)),
            witness=self._context.me,
            learners=(),
            absent=(),
            sponsored=sponsored,
            attempt=-1,
        )
        body = msg.StartBody(head, found.undoes if found is not None else ())
        signed = self._context.signer.sign(evidence.START, body)
        undone = found.rounds if found is not None else 0
        told = {"term": head.term, "round": head.round, "members": len(head.members), "undone": undone}
        self._context.out.emit(Regrouped(**told))
        self._set_mute(False)
        self._offered = None
        self.watch.started()
        self._chain.learn([msg.ChainLink(head, start=signed)])  # the node commits it to disk, then sends it to all
