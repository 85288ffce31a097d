"""The bookkeeping of exchanges: rosters, the owners' signed results, and the hashes of the states built from them."""

from __future__ import annotations

import msgspec

from peer.catalogue.groups import RosterFull
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.actions import Build, MergeSlices
from swarm.protocol.agreement.round.instance import Exchange, name_build
from swarm.protocol.agreement.round.parts import RoundParts
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.agreement.rules.succession import Succession
from swarm.protocol.head import Head, Member
from swarm.protocol.roster_room import bytes_of


class Exchanges:
    """The exchanges of one node for the round after one head."""

    def __init__(self, parts: RoundParts) -> None:
        self._context, self._chain, self._instance = parts.context, parts.chain, parts.instance
        self._timeouts, self._applicants = parts.timeouts, parts.applicants
        self._succession = Succession(parts.context)

    def begin(self, peer: str, order: msg.RosterMessage) -> bool:
        """Take part in the exchange of an attempt's roster, and forward that if its leader asks for it. Return whether
        this node has the roster."""
        instance = self._instance
        if order.attempt < instance.ballot.promised:
            return False
        known = instance.rosters.get(order.attempt)
        if known is not None and known.body == order.roster.body:
            return True
        opened = self._succession.roster(order.plan, order.roster, instance.head, instance.hash)
        if opened.attempt != order.attempt:
            raise ProtocolViolation("a roster is for another attempt than its message")
        if known is not None:
            self._applicants.convict(evidence.ROSTER, known, order.roster)
            return False
        self.open(opened)
        if order.pass_on and peer == leader_of(instance.head, instance.hash, order.attempt).peer:
            concerned = (*instance.head.members, *(body.member for body in opened.contributions))
            alone = msgspec.structs.replace(order, pass_on=())
            for other in sorted({member.peer for member in concerned}.intersection(order.pass_on)):
                self._context.out.send(other, alone, able=True)  # else it would not be named
        return True

    def open(self, opened: OpenedRoster) -> Exchange:
        """Begin an exchange, or return the one that is under way."""
        instance, context = self._instance, self._context
        if opened.key in instance.exchanges:
            return instance.exchanges[opened.key]
        leader = leader_of(instance.head, instance.hash, opened.attempt)
        self._timeouts.extend(
            leader, opened.attempt, "roster", context.work.exchange_s(instance.head) + self._timeouts.turn_s
        )
        exchange = instance.exchanges[opened.key] = Exchange(opened, building_at=context.now)
        instance.set_roster(opened.attempt, opened.signed)
        instance.missing = None if instance.missing is None else (instance.missing[0], ())
        self._tell_full(opened)
        if not context.config.is_coordinator:
            context.out.add(MergeSlices(opened))
        return exchange

    def _tell_full(self, opened: OpenedRoster) -> None:
        """Tell if the roster had no room for some members, or for this peer's contribution, of whatever length."""
        context, instance = self._context, self._instance
        left_out = set(opened.left_out)
        mine = instance.contribution if instance.plan_hash == opened.plan.hash else None
        if mine is not None and all(body.member != context.me for body in opened.contributions):
            fits = opened.size + bytes_of(mine) <= context.config.roster_bytes
            left_out |= set() if fits else {context.me}
        if left_out:
            context.out.emit(
                RosterFull(
                    round=opened.next.round,
                    members=len(opened.contributions),
                    bytes=opened.size,
                    left_out=len(left_out),
                    peers=tuple(sorted(member.peer for member in left_out)),
                )
            )

    def merged(self, event: events.SliceResult) -> None:
        """Take the hash of a slice that this node has merged; once all of its slices are, sign and send them."""
        exchange = self._instance.exchanges.get(event.key)
        if exchange is None or exchange.my_results is not None:
            return
        mine = exchange.opened.parts.get(self._context.me, ())
        if event.index in mine:
            exchange.merged[event.index] = event.hash
        if len(exchange.merged) == len(mine) > 0:
            hashes = tuple(exchange.merged[index] for index in mine)
            body = msg.ResultsBody(self._instance.hash, exchange.opened.attempt, event.key, hashes)
            exchange.my_results = self._context.signer.sign(evidence.RESULTS, body)
            self.repeat()

    def repeat(self) -> None:
        """Send this node's results of the latest attempt to its leader, whose proposal shows them to all."""
        attempt = self._instance.ballot.attempt
        for exchange in list(self._instance.exchanges.values()):
            if exchange.my_results is None or exchange.opened.attempt < attempt or attempt in self._instance.proposed:
                continue
            leader = leader_of(self._instance.head, self._instance.hash, exchange.opened.attempt)
            self._context.out.send(leader.peer, msg.ResultsMessage(self._instance.hash, exchange.my_results))

    def results(self, message: msg.ResultsMessage) -> Exchange | None:
        """Take an owner's signed results. Return their exchange; None if it is not known here."""
        instance, signed = self._instance, message.results
        body = self._context.signer.open(signed, evidence.RESULTS, msg.ResultsBody)
        exchange = instance.exchanges.get(body.key)
        if exchange is not None:
            owner, body = self._succession.results(signed, exchange.opened, instance.hash)
            self.note_results(exchange, {owner: (signed, body)})
            self.build(exchange)
        return exchange

    def note_results(self, exchange: Exchange, results: dict[Member, tuple[Signed, msg.ResultsBody]]) -> None:
        """Take checked results. An owner that has signed two for one exchange is convicted."""
        for owner, (signed, body) in sorted(results.items()):
            known = exchange.results.setdefault(owner, (signed, body))
            if known[1] != body:
                self._applicants.convict(evidence.RESULTS, known[0], signed)

    def build(self, exchange: Exchange) -> None:
        """Build the next state once all owners' results are known, unless they are the same as before."""
        hashes = exchange.hashes
        if hashes is None or self._context.config.is_coordinator:
            return
        opened, name = exchange.opened, name_build(exchange.opened.key, hashes)
        if name in exchange.building or not self._chain.has_state:
            return
        exchange.building[name], exchange.building_at = None, self._context.now
        self._chain.drop_candidates()
        owners = [member.peer for member in opened.parts]
        others = [body.member.peer for body in opened.contributions]
        named = dict.fromkeys([*owners, *sorted(exchange.voters), *others])
        holders = tuple(peer for peer in named if peer != self._context.config.peer)
        self._context.out.add(Build(name, opened, hashes, holders))

    def rebuild(self, exchange: Exchange) -> None:
        """Build a state again that another one has replaced."""
        hashes = exchange.hashes
        if hashes is not None and exchange.building.get(name_build(exchange.opened.key, hashes)) is not None:
            del exchange.building[name_build(exchange.opened.key, hashes)]
        self.build(exchange)

    def built(self, event: events.Built) -> Exchange | None:
        """Take a built state. Return its exchange; None if that is over or it could not be built."""
        exchange = self._instance.exchanges.get(event.key)
        if exchange is None or exchange.building.get(event.name) is not None:
            return None
        if event.state_hash is None:
            exchange.building.pop(event.name, None)
            exchange.failed = True
            return None
        exchange.building[event.name] = event.state_hash
        self._chain.hold(event.state_hash)
        return exchange

    def is_building(self, head: Head) -> bool:
        """Return whether the state of a certified head is likely being built here, from results that their owners send:
        no peer brings it sooner. If that takes longer than an exchange may, it is to be fetched."""
        before, me = self._instance.head, self._context.me
        over = self._context.now - self._context.work.exchange_s(before)
        known = list(self._instance.exchanges.values())
        return any(
            (None in exchange.building.values() or (exchange is known[-1] and not exchange.building))
            and exchange.building_at > over
            and (before.has(me) or any(body.member == me for body in exchange.opened.contributions))
            and exchange.opened.leads_to(head)
            for exchange in known
        )

    def state_of(self, exchange: Exchange) -> bytes | None:
        """Return the hash of the state that the exchange's results lead to, if it was built here."""
        hashes = exchange.hashes
        return None if hashes is None else exchange.building.get(name_build(exchange.opened.key, hashes))

    def missing(self, event: events.Missing) -> None:
        """Note what the present exchange waits for: promises report it to the next leader, and which contributors the
        round's exchanges before it waited for. So a contributor that deceives one owner after the other is accused by
        more than each of them is."""
        if event.key in self._instance.exchanges:
            before = self._instance.missing[0] if self._instance.missing else ()
            self._instance.missing = (tuple(sorted({*before, *event.contributors})), event.owners)
