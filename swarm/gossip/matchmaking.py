"""Matchmaking for pairwise exchanges: proposals are made and answered, one exchange at a time.

A peer that has done its inner steps proposes to others at random. A peer agrees if it is ready too or will be in time,
and refuses other proposals from then on; there is no queue. Where two propose to each other at once, the proposal of
the lower peer id wins. After a partner that fails another is asked; with none left, or at its deadline, the peer
continues alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import trio

from peer.bounds import MEMBERS_MAX, Latest
from peer.catalogue.groups import PeerPenalized
from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RemoteError, RoundDiscarded
from peer.events import EventLog
from peer.net.host import Host
from peer.net.method import Empty
from peer.net.rpc import Buffer, Call
from peer.notifier import Notifier
from swarm.gossip import messages as msg
from swarm.gossip.exchange import PairExchange, Terms
from swarm.gossip.outgoing import OutgoingUpdate
from swarm.gossip.pairing import APART_MAX
from swarm.gossip.peer_scores import PeerScores
from swarm.protocol.timeouts import AdaptiveTimeouts

RECENT_MAX: Final = 3  # exchanges whose updates a slower partner may still fetch
PAUSE_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0

Examine = Callable[[PairExchange], Awaitable[None]]


class Matchmaker:
    """Finds partners, and runs exchanges in `tasks`. `heard` collects the rounds that peers reported, newer than their
    records; at most `MEMBERS_MAX` of peers that were not asked."""

    def __init__(
        self, host: Host, timeouts: AdaptiveTimeouts, events: EventLog, tasks: trio.Nursery, heard: dict[str, int]
    ) -> None:
        self.scores = PeerScores(trio.current_time)
        self.finished = False
        self._host, self._timeouts, self._events, self._tasks = host, timeouts, events, tasks
        self._random = Random(secrets.randbits(64))
        self._heard = heard
        self._outgoing: OutgoingUpdate | None = None
        self._round = 0
        self._ready_at = 0.0
        self._exchange: PairExchange | None = None
        self._recent = Latest[bytes, PairExchange](RECENT_MAX)
        self._proposing_to: str | None = None
        self._engaged = Notifier()
        rpc = host.rpc
        rpc.register(msg.PROPOSE, self._on_propose)
        rpc.register(msg.COMMIT, self._on_commit)
        rpc.register(msg.SLICE, self._on_slice)
        rpc.register(msg.LEAVE, self._on_leave)

    # -- one round -----------------------------------------------------------------------------------------------------

    def open(self, outgoing: OutgoingUpdate, round_number: int, ready_at: float) -> None:
        """Accept proposals from now on; this peer's work will be done at about `ready_at` (trio's clock)."""
        self._outgoing, self._round, self._ready_at = outgoing, round_number, ready_at

    async def meet(self, ask: Callable[[], list[str]], wait_s: float, examine: Examine) -> PairExchange | None:
        """Exchange the update, now complete, with one of the peers that `ask()` names. None if none came in time.

        `examine` decides whether the partner's update is accepted: ProtocolViolation is penalized, RoundDiscarded none.
        """
        deadline = trio.current_time() + wait_s
        pause_s = PAUSE_S
        useless: set[str] = set()  # in this round
        while True:
            if self._exchange is not None:
                exchange = self._exchange
                if await self._outcome(exchange, examine):
                    return exchange
                useless.add(exchange.terms.partner)
                continue
            names = [peer for peer in ask() if peer not in useless and not self.scores.avoids(peer)]
            if not names or trio.current_time() >= deadline:
                self._outgoing = None  # before another proposal can be accepted
                return None
            for peer in names:
                if self._exchange is None and trio.current_time() < deadline:
                    await self._propose(peer, deadline, useless)
            if self._exchange is None:
                await self._engaged.wait(self._random.uniform(0.5, 1.5) * pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def close(self) -> None:
        """End the round: leave an exchange that has not ended, and begin no other."""
        self._outgoing = None
        exchange, self._exchange = self._exchange, None
        self._host.watch(())
        if exchange is not None and not exchange.over.is_set():
            self._tasks.start_soon(exchange.leave)

    async def serve_partner(self) -> None:
        """Stay until the last partners have fetched all of this peer's updates, as long as an exchange may take."""
        for exchange in self._recent.values():
            if exchange.failure is None:
                coding = exchange.outgoing.coding
                with trio.move_on_after(self._timeouts.exchange_s(sum(map(coding.total, msg.HALVES)))):
                    await exchange.fetched.wait()

    async def _outcome(self, exchange: PairExchange, examine: Examine) -> bool:
        await exchange.over.wait()
        if exchange.failure is not None:  # perhaps only now: the partner sent everything and then something else
            self._part(exchange, exchange.failure)
            return False
        try:
            await examine(exchange)
        except BarnraiseError as error:
            self._part(exchange, error)
            return False
        self.scores.fine(exchange.terms.partner)
        return True

    async def _propose(self, peer: str, deadline: float, useless: set[str]) -> None:
        wait_s = deadline - trio.current_time()
        proposal = msg.Propose(secrets.token_bytes(16), self._round, wait_s)
        self._proposing_to = peer
        try:
            reply = await self._host.rpc.call(peer, msg.PROPOSE, proposal, timeout_s=self._timeouts.answer_s)
        except (NetworkError, ProtocolViolation) as error:
            self._blame(peer, error)
            return
        finally:
            self._proposing_to = None
        answer = reply.body
        self._heard[peer] = answer.round
        ahead = answer.round - self._round
        if answer.verdict in ("apart", "done") or abs(ahead) > APART_MAX:
            useless.add(peer)
        elif answer.verdict == "come" and self._exchange is None:
            self._begin(Terms(proposal.meeting, peer, True, ahead, wait_s))

    def _begin(self, terms: Terms) -> None:
        assert self._outgoing is not None
        self._exchange = self._recent[terms.id] = PairExchange(terms, self._outgoing, self._host, self._timeouts)
        self._host.watch([terms.partner])
        self._engaged.notify()
        self._tasks.start_soon(self._hold, self._exchange)

    async def _hold(self, exchange: PairExchange) -> None:
        await exchange.run()
        if exchange.failure is not None:
            self._part(exchange, exchange.failure)

    def _part(self, exchange: PairExchange, error: BarnraiseError) -> None:
        """Give the exchange up, and be free for another."""
        if self._exchange is not exchange:
            return  # closed by this peer
        self._exchange = None
        self._host.watch(())
        partner = exchange.terms.partner
        self._events.emit("exchange_failed", peer=partner, round=self._round, reason=str(error))
        self._blame(partner, error)
        self._tasks.start_soon(exchange.leave)

    def _blame(self, peer: str, error: BarnraiseError) -> None:
        if isinstance(error, ProtocolViolation):
            self.scores.penalize(peer)
            self._events.emit(PeerPenalized(peer=peer, reason=str(error)))
        elif isinstance(error, RemoteError) and error.code == RoundDiscarded.__name__:
            return  # the partner has gone on without this peer
        elif isinstance(error, NetworkError):
            self.scores.failed(peer)

    # -- calls from others ---------------------------------------------------------------------------------------------

    async def _on_propose(self, call: Call[msg.Propose]) -> msg.Answer:
        ask = call.body
        if self.finished:
            return msg.Answer("done", self._round)
        if call.peer in self._heard or len(self._heard) < MEMBERS_MAX:
            self._heard[call.peer] = ask.round
        if abs(ask.round - self._round) > APART_MAX:
            return msg.Answer("apart", self._round)
        in_s = max(0.0, self._ready_at - trio.current_time())
        rival = self._proposing_to
        engaged = rival is not None and not (rival == call.peer < self._host.peer_id)
        free = self._outgoing is not None and self._exchange is None and not engaged
        if not free or not in_s <= ask.wait_s or self.scores.avoids(call.peer) or ask.meeting in self._recent:
            return msg.Answer("busy", self._round, in_s)
        self._begin(Terms(ask.meeting, call.peer, False, ask.round - self._round, 0.0))
        return msg.Answer("come", self._round, in_s)

    async def _on_commit(self, call: Call[msg.Commit]) -> msg.Committed:
        exchange = self._named(call.body.meeting, call.peer)
        try:
            packed = await exchange.take_commitment(call.body)
        except ProtocolViolation as error:
            exchange.fail(error)
            raise
        return msg.Committed(packed.hashes)

    async def _on_slice(self, call: Call[msg.AskSlice]) -> tuple[Empty, Buffer]:
        ask = call.body
        return Empty(), await self._named(ask.meeting, call.peer).serve_slice(ask.half, ask.index)

    async def _on_leave(self, call: Call[msg.Leave]) -> Empty:
        self._named(call.body.meeting, call.peer).left()
        return Empty()

    def _named(self, name: bytes, peer: str) -> PairExchange:
        exchange = self._recent.get(name)
        if exchange is None or exchange.terms.partner != peer:
            raise RoundDiscarded("there is no such exchange here any more")
        return exchange
