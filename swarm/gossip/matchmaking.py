"""Finding somebody to meet: proposals made and answered, one meeting at a time.

Whoever has done its inner steps asks others at random. Who is asked says yes if it is ready too or will be in time, and
is then spoken for; nobody is asked to wait in a queue. Two that ask each other at once meet: the lower peer id's
proposal stands. A partner that fails costs what was waited for it, then another is asked; with nobody left, or out of
patience, the peer goes on alone.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final

import trio

from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RemoteError, RoundDiscarded
from peer.events import EventLog
from peer.net.host import Host
from peer.net.rpc import Buffer, Call
from swarm.gossip import messages as say
from swarm.gossip.exchange import PairExchange, Terms
from swarm.gossip.outgoing import OutgoingUpdate
from swarm.gossip.pairing import APART_MAX
from swarm.gossip.peer_scores import PeerScores
from swarm.protocol.timeouts import AdaptiveTimeouts

HELD_BACKUP: Final = 3  # meetings whose letters a slower partner may still fetch
PAUSE_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0

Examine = Callable[[PairExchange], Awaitable[None]]


class Matchmaker:
    """`tasks` runs the meetings; in `heard` it notes the rounds that peers told, newer than their records."""

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
        self._meeting: PairExchange | None = None
        self._recent: OrderedDict[bytes, PairExchange] = OrderedDict()
        self._proposing_to: str | None = None
        self._engaged = trio.Event()
        rpc = host.rpc
        rpc.register(say.PROPOSE, self._on_propose)
        rpc.register(say.COMMIT, self._on_commit)
        rpc.register(say.SLICE, self._on_slice)
        rpc.register(say.LEAVE, self._on_leave)

    # -- one round -----------------------------------------------------------------------------------------------------

    def open(self, outgoing: OutgoingUpdate, round_number: int, ready_at: float) -> None:
        """From now on others may propose; our work will be done at about `ready_at` (trio's clock)."""
        self._outgoing, self._round, self._ready_at = outgoing, round_number, ready_at

    async def meet(self, ask: Callable[[], list[str]], wait_s: float, examine: Examine) -> PairExchange | None:
        """Our letter is sealed: meet somebody, of those that `ask()` names. None if nobody could be met in time.

        `examine` decides whether the partner's message is taken: ProtocolViolation is a strike, RoundDiscarded none."""
        deadline = trio.current_time() + wait_s
        pause_s = PAUSE_S
        useless: set[str] = set()  # this time
        while True:
            if self._meeting is not None:
                meeting = self._meeting
                if await self._attend(meeting, examine):
                    return meeting
                useless.add(meeting.terms.partner)
                continue
            names = [peer for peer in ask() if peer not in useless and not self.scores.avoids(peer)]
            if not names or trio.current_time() >= deadline:
                self._outgoing = None  # before anybody can be told to come
                return None
            for peer in names:
                if self._meeting is None and trio.current_time() < deadline:
                    await self._propose(peer, deadline, useless)
            if self._meeting is None:
                self._engaged = trio.Event()
                with trio.move_on_after(self._random.uniform(0.5, 1.5) * pause_s):
                    await self._engaged.wait()
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def close(self) -> None:
        """No more meetings for this letter; one that has not ended is left."""
        self._outgoing = None
        meeting, self._meeting = self._meeting, None
        self._host.watch(())
        if meeting is not None and not meeting.over.is_set():
            self._tasks.start_soon(meeting.leave)

    async def serve_partner(self) -> None:
        """Until the partner of the last meeting has all it can want of us, for as long as an exchange may take."""
        for meeting in self._recent.values():
            if meeting.failure is None:
                coding = meeting.outgoing.coding
                with trio.move_on_after(self._timeouts.exchange_s(sum(map(coding.total, say.HALVES)))):
                    await meeting.fetched.wait()

    async def _attend(self, meeting: PairExchange, examine: Examine) -> bool:
        await meeting.over.wait()
        if meeting.failure is not None:  # perhaps only now, of a partner that has sent all and then something else
            self._part(meeting, meeting.failure)
            return False
        try:
            await examine(meeting)
        except BarnraiseError as error:
            self._part(meeting, error)
            return False
        self.scores.fine(meeting.terms.partner)
        return True

    async def _propose(self, peer: str, deadline: float, useless: set[str]) -> None:
        wait_s = deadline - trio.current_time()
        proposal = say.Propose(secrets.token_bytes(16), self._round, wait_s)
        self._proposing_to = peer
        try:
            reply = await self._host.rpc.call(peer, say.PROPOSE, proposal, timeout_s=self._timeouts.answer_s)
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
        elif answer.verdict == "come" and self._meeting is None:
            self._begin(Terms(proposal.meeting, peer, True, ahead, wait_s))

    def _begin(self, terms: Terms) -> None:
        assert self._outgoing is not None
        self._meeting = self._recent[terms.id] = PairExchange(terms, self._outgoing, self._host, self._timeouts)
        while len(self._recent) > HELD_BACKUP:
            self._recent.popitem(last=False)
        self._host.watch([terms.partner])
        self._engaged.set()
        self._tasks.start_soon(self._hold, self._meeting)

    async def _hold(self, meeting: PairExchange) -> None:
        await meeting.run()
        if meeting.failure is not None:
            self._part(meeting, meeting.failure)

    def _part(self, meeting: PairExchange, error: BarnraiseError) -> None:
        """That meeting came to nothing: be free for another."""
        if self._meeting is not meeting:
            return  # closed, and nobody's fault
        self._meeting = None
        self._host.watch(())
        partner = meeting.terms.partner
        self._events.emit("exchange_failed", peer=partner, round=self._round, reason=str(error))
        self._blame(partner, error)
        self._tasks.start_soon(meeting.leave)

    def _blame(self, peer: str, error: BarnraiseError) -> None:
        if isinstance(error, ProtocolViolation):
            self.scores.strike(peer)
            self._events.emit("peer_penalized", peer=peer, reason=str(error))
        elif isinstance(error, RemoteError) and error.code == RoundDiscarded.__name__:
            return  # it has gone on without us
        elif isinstance(error, NetworkError):
            self.scores.failed(peer)

    # -- calls from others ---------------------------------------------------------------------------------------------

    async def _on_propose(self, call: Call[say.Propose]) -> say.Answer:
        ask = call.body
        if self.finished:
            return say.Answer("done", self._round)
        if abs(ask.round - self._round) > APART_MAX:
            return say.Answer("apart", self._round)
        in_s = max(0.0, self._ready_at - trio.current_time())
        rival = self._proposing_to
        spoken_for = rival is not None and not (rival == call.peer < self._host.peer_id)
        free = self._outgoing is not None and self._meeting is None and not spoken_for
        if not free or not in_s <= ask.wait_s or self.scores.avoids(call.peer) or ask.meeting in self._recent:
            return say.Answer("busy", self._round, in_s)
        self._begin(Terms(ask.meeting, call.peer, False, ask.round - self._round, 0.0))
        return say.Answer("come", self._round, in_s)

    async def _on_commit(self, call: Call[say.Commit]) -> say.Committed:
        meeting = self._named(call.body.meeting, call.peer)
        try:
            packed = await meeting.take_commitment(call.body)
        except ProtocolViolation as error:
            meeting.fail(error)
            raise
        return say.Committed(packed.hashes)

    async def _on_slice(self, call: Call[say.AskSlice]) -> tuple[say.Nothing, Buffer]:
        ask = call.body
        return say.Nothing(), await self._named(ask.meeting, call.peer).give(ask.half, ask.index)

    async def _on_leave(self, call: Call[say.Leave]) -> say.Nothing:
        self._named(call.body.meeting, call.peer).left()
        return say.Nothing()

    def _named(self, name: bytes, peer: str) -> PairExchange:
        meeting = self._recent.get(name)
        if meeting is None or meeting.terms.partner != peer:
            raise RoundDiscarded("there is no such meeting here any more")
        return meeting
