"""The parts of a node that exist until it leaves its head, and which message goes to which."""

from __future__ import annotations

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.round.election_timeouts import ElectionTimeouts
from swarm.protocol.agreement.round.exchanges import Exchanges
from swarm.protocol.agreement.round.instance import Instance
from swarm.protocol.agreement.round.leader import AttemptLeader
from swarm.protocol.agreement.round.participant import Participant
from swarm.protocol.agreement.round.parts import RoundParts
from swarm.protocol.agreement.round.voting import Voter
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.head import Head


class OpenRound:
    """The round after one head at one node."""

    def __init__(
        self, context: AgreementContext, chain: Chain, applicants: Applicants, instance: Instance, round_s: float
    ) -> None:
        self._context, self._chain = context, chain
        self.instance = instance
        self._timeouts = ElectionTimeouts(context, instance, round_s)
        parts = RoundParts(context, chain, instance, self._timeouts, applicants)
        self.participant, self._exchanges = Participant(parts), Exchanges(parts)
        self._voter = Voter(parts, self.participant, self._exchanges)
        self.leader = AttemptLeader(parts, self._exchanges)
        if instance.accepted is not None:
            chain.kept = instance.accepted.value.state_hash

    @property
    def _leads(self) -> bool:
        """Whether this node may lead attempts here."""
        rounds = self._context.config.rounds
        complete = rounds and self.instance.head.round >= rounds
        return not complete and self.instance.head.has(self._context.me)

    def begin(self) -> None:
        """Wait for the first leader, or lead."""
        if not self.instance.head.members:
            return
        leads = self._timeouts.begin()
        if self.instance.here is None:  # the process before this one may have said that it has a plan
            self.participant.inform(self._timeouts.leader.peer)
        if leads and self._leads:
            self.leader.begin()

    def turn(self) -> None:
        """Let the next leader try, if the present one's time is over."""
        if not self.instance.head.members or not self._timeouts.is_over():
            return
        self._timeouts.expire()
        self._go_on()

    @property
    def attempt(self) -> int:
        """The attempt for which this node waits."""
        return self._timeouts.latest

    def heard(self, message: msg.StatusMessage) -> None:
        """Follow a voter to the later attempt for which it waits, if the present leader makes no progress; note whether
        it has the plan and the roster."""
        self.leader.informed(message.voter, message.plan, message.roster)
        if self.instance.head.members and self._timeouts.heard(message.voter, message.attempt):
            self._go_on()

    def _go_on(self) -> None:
        """Answer leaders that had to wait, or lead: this node waits for another attempt now."""
        self.participant.promise_pending()
        if self._timeouts.leader == self._context.me and self._leads:
            self.leader.begin()

    def receive(self, peer: str, message: msg.Message) -> None:
        """Take a message about the round after this head."""
        match message:
            case msg.PrepareMessage():
                self.participant.prepare(peer, message)
            case msg.PromiseMessage():
                self.leader.promise(peer, message)
            case msg.PlanMessage():
                self.participant.work(peer, message)
            case msg.SubmitMessage():
                self.leader.submit(peer, message)
            case msg.RosterMessage():
                if self._exchanges.begin(peer, message):
                    leader = leader_of(self.instance.head, self.instance.hash, message.attempt)
                    self.participant.inform(leader.peer)
            case msg.ResultsMessage():
                exchange = self._exchanges.results(message)
                if exchange is not None:
                    self.leader.built(exchange)  # as it may be, from what the owners have sent
            case msg.ProposalMessage():
                self._voter.propose(message)
            case msg.ShortProposalMessage():
                if not self._voter.propose_short(message):
                    self.participant.inform(peer)
            case msg.VoteMessage():
                self._voter.vote(message)
            case _:
                pass

    def submitted(self, event: events.Submitted) -> None:
        self.participant.submitted(event)

    def merged(self, event: events.SliceResult) -> None:
        self._exchanges.merged(event)

    def missing(self, event: events.Missing) -> None:
        self._exchanges.missing(event)

    def built(self, event: events.Built) -> None:
        """Propose or vote for what was built."""
        exchange = self._exchanges.built(event)
        if exchange is None:
            self.leader.give_up_exchange()
        else:
            self.leader.built(exchange)
            for attempt in sorted(self.instance.proposed):
                self._voter.consider(attempt)

    def is_building(self, head: Head) -> bool:
        """As `Exchanges.is_building`."""
        return self._exchanges.is_building(head)

    def here(self, message: msg.VoteMessage, body: msg.VoteBody) -> bool:
        """Take a late vote for this head: its sender is up and has the state. Return whether it is its first; a sender
        that repeats its vote lacks those of others."""
        news = body.voter not in (self.instance.here or {})
        if self.instance.here is not None and self.instance.head.has(body.voter):
            self.instance.here[body.voter] = message.measured
            self.leader.here(body.voter, message.measured)
        return news

    def peer_down(self) -> None:
        """Do not wait for a peer that is down."""
        self.leader.assemble()
        self.leader.collect()
        self.leader.give_up_exchange()
        self.turn()

    def repeat(self) -> None:
        """Send again what may have been lost."""
        if self.instance.head.members:
            self.leader.repeat()
            self.participant.repeat()
            self._exchanges.repeat()
            self._voter.repeat()
