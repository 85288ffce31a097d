"""One peer's part in the agreement of one group: events in, actions out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from peer.catalogue.rounds import RunCompleted
from peer.errors import ProtocolViolation, RoundDiscarded
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.actions import Action, CommitHead
from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.coordinator import TIMER as ASK_TIMER
from swarm.protocol.agreement.coordination.coordinator import Coordinator
from swarm.protocol.agreement.early import EarlyMessages
from swarm.protocol.agreement.head_gossip import HeadGossip
from swarm.protocol.agreement.packing import unpacked
from swarm.protocol.agreement.records import BALLOT_KEY, IDENTITY_KEY, is_damaged
from swarm.protocol.agreement.round import election_timeouts
from swarm.protocol.agreement.round.attempt import TIMER as STEP_TIMER
from swarm.protocol.agreement.round.instance import Instance
from swarm.protocol.agreement.round.open_round import OpenRound
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.signing import Signer
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member

POLL_TIMER: Final = "poll"
STOOD_STILL_POLLS: Final = 4.0  # without a step, since the process or its machine was frozen
WITNESS_SESSION: Final = "coordinator"
"""The coordinator's incarnation where it is a required voter: always the same one, since its votes are its commits."""


class AgreementNode:
    """A member, a newcomer or the coordinator of one group, by its config.

    The driver feeds it events one by one and carries out the actions in order; the first event is `Started`. All
    parts below belong to this node alone; those in `OpenRound` live until it leaves its head."""

    def __init__(self, config: AgreementConfig, signer: Signer, work: Work) -> None:
        self._config = config
        self._context = AgreementContext(config, signer, work)
        self._chain = Chain(self._context)
        self._applicants = Applicants(self._context, self._chain)
        self._gossip = HeadGossip(self._context, self._chain)
        self._early = EarlyMessages()
        self._coordinator: Coordinator | None = None
        if config.is_coordinator:
            self._coordinator = Coordinator(self._context, self._chain, self._applicants)
        self._entered_at = 0.0
        self._completed = False
        self._started = False
        self._round = self._enter(Instance(self._chain.head, self._chain.hash))

    # -- what the driver and tests may read ----------------------------------------------------------------------------

    @property
    def me(self) -> Member:
        """This node as a voter."""
        return self._context.me

    @property
    def head(self) -> Head:
        """This node's head. Its `CommitHead` may still wait for the disk."""
        return self._chain.head

    def proof_of(self, head_hash: bytes) -> tuple[msg.ChainLink, ...]:
        """Return the proof that a head counts at which this node has been (`proof.ProofChecker`); empty if it has none.
        Only what is on disk may be sent: a head's link is, once its `CommitHead` came."""
        return self._chain.proof_of(head_hash)

    def led_to(self, head_hash: bytes, after: bytes) -> Iterator[Head]:
        """Return a head at which this node has been and those before it, newest first, as far as they are kept and
        until the head `after`. They need no proof: each is named by the hash in its successor."""
        return self._chain.led_to(head_hash, after)

    @property
    def phase(self) -> str:
        """This node's activity, for display."""
        if self._coordinator is not None:
            return "coordinating"
        if not self._chain.is_voter(self._context.me):
            return "joining"
        return "leading" if self._round.leader.phase is not None else "training"

    @property
    def workers(self) -> list[str]:
        """Peers that may have counted samples of this round (`events.Gathered`): members, learners and peers that ask
        to be taken in, also those that missed the present plan; none that has claimed samples falsely too often."""
        head, leader = self._chain.head, self._round.leader
        learners = (learner.member for learner in head.learners)
        inside = {*head.members, *learners, *leader.planned, *self._applicants.joins(head)}
        return sorted({member.peer for member in inside} - leader.doubted)

    def step(self, now: float, event: events.Event) -> list[Action]:
        """Take one event at time `now` (seconds of any clock that does not go back). Total and deterministic: it
        never raises because of an event, and the same events give the same actions."""
        stood_s, self._context.now = now - self._context.now, max(now, self._context.now)
        if not self._started:
            if isinstance(event, events.Started):
                self._begin(event)
                self._settle()
            return self._context.out.take()
        if self._coordinator is not None and stood_s > STOOD_STILL_POLLS * self._config.poll_s:
            self._coordinator.woke()
        self._guarded(event)
        self._settle()
        return self._context.out.take()

    def _guarded(self, event: events.Event) -> None:
        """Take an event. If it breaks the protocol, accuse its sender."""
        try:
            self._take(event)
        except (ProtocolViolation, RoundDiscarded) as error:
            sender = event.peer if isinstance(event, events.Received) else self._config.peer
            if sender != self._config.peer and isinstance(error, ProtocolViolation):
                self._context.blame(sender, error)
            else:
                self._context.out.emit("refused", reason=str(error))

    def _settle(self) -> None:
        """Move on along the certified chain, and take this node's messages to itself, until nothing is left to do."""
        while True:
            path = self._chain.next_stop(self._round.is_building)
            if path is not None:
                self._move(path)
                continue
            next_one = self._context.out.mine()
            if next_one is None:
                return
            self._guarded(events.Received(*next_one))

    # -- start ---------------------------------------------------------------------------------------------------------

    def _begin(self, event: events.Started) -> None:
        context, config = self._context, self._config
        self._started = True
        context.seed = event.seed
        session = event.session
        if not config.is_coordinator:
            stored = event.records.get(IDENTITY_KEY, b"").decode("ascii", "replace")
            if stored and not is_damaged(event.records):
                session = stored
            else:  # votes of this peer may be missing from this disk, so it is another voter than before
                context.out.persist(IDENTITY_KEY, session.encode())
        elif config.mode == "required":
            session = WITNESS_SESSION
        context.me = Member(config.peer, session)
        self._chain.load(event.records, event.states)
        if self._coordinator is not None:
            self._coordinator.load(event)
            self._declare_witness()
        loaded = Instance.load(self._chain.head, self._chain.hash, event.records.get(BALLOT_KEY))
        self._round = self._enter(loaded)
        context.out.timer(POLL_TIMER, context.now + config.poll_s)
        self._round.begin()
        self._gossip.poll(context.me, self._round.attempt, self._round.instance)

    def _enter(self, instance: Instance) -> OpenRound:
        """Return the parts for the round after the present head."""
        round_s = self._context.now - self._entered_at if self._started else 0.0
        self._entered_at = self._context.now
        return OpenRound(self._context, self._chain, self._applicants, instance, round_s)

    def _declare_witness(self) -> None:
        if self._config.mode == "witness":
            body = msg.WitnessBody(self._config.genesis.run_id, self._context.me)
            self._applicants.witness = self._context.signer.sign(evidence.WITNESS, body)

    # -- events --------------------------------------------------------------------------------------------------------

    def _take(self, event: events.Event) -> None:
        context, open_round = self._context, self._round
        match event:
            case events.Received():
                self._receive(event.peer, unpacked(event.message))
            case events.TimerFired():
                self._time(event.id)
            case events.Persisted():
                context.out.persisted(event.id)
            case events.Submitted():
                open_round.submitted(event)
            case events.LinksMeasured():
                self._applicants.rates = event.rates
            case events.Paused():
                self._applicants.paused = event.paused
                self._request_join()
            case events.Gathered():
                if event.head == self._chain.hash:
                    open_round.leader.gathered(event)
            case events.SliceResult():
                open_round.merged(event)
            case events.Built():
                open_round.built(event)
            case events.StateFetched():
                self._chain.fetched(event.state_hash, event.ok)
            case events.Missing():
                open_round.missing(event)
            case events.Judged():
                context.judged = frozenset(event.peers)
            case events.RegroupRequested():
                if self._coordinator is not None:
                    self._coordinator.ask(event)
            case events.PeerDown():
                context.down.add(event.peer)
                open_round.peer_down()
            case events.PeerUp():
                context.down.discard(event.peer)
                context.know(event.peer)
            case events.Started():
                pass

    def _time(self, id: str) -> None:
        if not self._context.out.is_due(id, self._context.now):
            return
        if id == POLL_TIMER:
            self._context.out.timer(POLL_TIMER, self._context.now + self._config.poll_s)
            self._poll()
        elif id == election_timeouts.TIMER:
            self._round.turn()
        elif id == STEP_TIMER:
            self._round.leader.time()
        elif id == ASK_TIMER and self._coordinator is not None:
            self._coordinator.time()

    def _poll(self) -> None:
        """Do what is periodic: send a status, repeat what may be lost, ask to join, watch the group."""
        self._chain.fetch_mine()
        self._round.repeat()
        self._gossip.poll(self._context.me, self._round.attempt, self._round.instance)
        self._request_join()
        overtaken = self._chain.overtaken()
        if overtaken:
            self._context.out.send(self._config.coordinator, msg.ChainMessage(overtaken))
        if self._coordinator is not None:
            self._coordinator.poll()
            if self._applicants.witness is not None and self._chain.head.witness != self._context.me:
                for member in self._chain.head.members:
                    self._context.out.send(member.peer, msg.WitnessMessage(self._applicants.witness))

    def _request_join(self) -> None:
        """Ask the members to be taken in, if this node is in no group."""
        request = self._applicants.request()
        if request is not None:
            voters = [member.peer for member in self._chain.head.members]
            for peer in dict.fromkeys([*voters, self._config.coordinator]):
                self._context.out.send(peer, msg.JoinMessage(request))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive(self, peer: str, message: msg.Message) -> None:
        self._context.know(peer)
        if peer == self._config.coordinator:
            self._chain.heard_coordinator()
        match message:
            case msg.StatusMessage():
                if message.voter.peer != peer:
                    raise ProtocolViolation("a status names another peer than its sender")
                self._note_able(peer, message)
                if self._coordinator is not None:
                    self._coordinator.status(message)
                self._gossip.status(peer, message, self._context.me)
                if message.head == self._chain.hash:
                    self._round.heard(message)
            case msg.AskChainMessage():
                self._gossip.ask_chain(peer, message)
            case msg.ChainMessage():
                if self._coordinator is not None:
                    self._coordinator.shown(peer, message.links)
                    self._coordinator.end_early()
                self._gossip.chain(peer, message)
            case msg.JoinMessage():
                self._applicants.add(peer, message.join)
            case msg.WitnessMessage():
                self._context.evidence.witness(message.witness)
                self._applicants.witness = message.witness
            case msg.EndorsementMessage():
                self._chain.endorse(self._context.evidence.endorsed(message.endorsement), message.endorsement)
            case msg.ProofMessage():
                self._applicants.take_proof(message.proof)
            case msg.AskMessage():
                self._gossip.answer(peer, message, self._context.me, self._round.instance)
            case msg.ReportMessage():
                if self._coordinator is not None:
                    self._coordinator.shown(peer, message.links)
                    self._chain.learn(message.links)
                    if message.position > self._chain.highest:  # it counts once its sender's chain proves it
                        self._gossip.ask(peer)
                        self._coordinator.told_further(peer, message)
                    else:
                        self._coordinator.told(peer, message)
            case _:
                self._route(peer, message)

    def _note_able(self, peer: str, message: msg.StatusMessage) -> None:
        """Note whether a peer of the run, of which a bounded number is known, names its roster and unpacks."""
        if message.roster is None or not message.unpacks:
            self._context.out.able.discard(peer)
        elif peer in self._context.known:
            self._context.out.able.add(peer)

    def _route(self, peer: str, message: msg.Message) -> None:
        """Hand a message to the round that it names. If it is another one, one of the two is behind."""
        name = evidence.head_named(message)
        if name == self._chain.hash:
            self._round.receive(peer, message)
        elif self._chain.is_past(name):
            if not self._is_late_vote(peer, message):
                self._gossip.tell(peer, self._context.me)
        else:
            self._early.keep(name, peer, message)
            self._gossip.ask(peer)

    def _is_late_vote(self, peer: str, message: msg.Message) -> bool:
        """Return whether a message about the last round is the first late vote of its sender for this head. It has no
        effect any more, so its signature is not checked; the connection proves its sender."""
        if not isinstance(message, msg.VoteMessage):
            return False
        body = evidence.claimed_vote(message)
        return body.value == self._chain.hash and body.voter.peer == peer and self._round.here(message, body)

    # -- heads ---------------------------------------------------------------------------------------------------------

    def _move(self, path: list[msg.ChainLink]) -> None:
        """Leave this head for a certified one whose state this node holds."""
        context, before = self._context, self._round
        link = path[-1]
        self._chain.adopt(path)
        context.out.add(CommitHead(link.head, link, before.instance.exchange_of(link.head)))
        self._applicants.settle(link.head, before.leader.planned)
        context.out.cancel_timer(STEP_TIMER)
        here = before.instance.voters_of(self._chain.hash)
        self._round = self._enter(Instance(self._chain.head, self._chain.hash, here=here))
        if self._coordinator is not None:
            self._coordinator.committed()
        self._spread(link, before.instance)
        if self._config.rounds and link.head.round >= self._config.rounds and not self._completed:
            self._completed = True
            context.out.emit(RunCompleted(round=link.head.round))
        self._round.begin()
        self._request_join()
        for peer, message in self._early.take(self._chain.hash):
            context.out.requeue(peer, message)

    def _spread(self, link: msg.ChainLink, before: Instance) -> None:
        """Send a head that the coordinator has completed or started itself to all whom it concerns. That of any other
        one comes from the next leader (`Voter`)."""
        if self._coordinator is None or (link.start is None and self._config.mode != "required"):
            return
        head = link.head
        told = {*head.members, *(learner.member for learner in head.learners), *before.head.members}
        asking = self._applicants.asking() if link.start is None else self._coordinator.peers()
        for peer in sorted({*(member.peer for member in told), *asking} - {self._config.peer}):
            self._context.out.send(peer, msg.ChainMessage((link,)))
