"""The handlers of calls about rounds: each call is routed to the round it names.

A call that names another head makes this peer look for the run's current head (`EngineState.look`). It never makes the
peer move to that head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from peer.bounds import MEMBERS_MAX, Hash
from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation, RoundDiscarded, RoundError
from peer.identity import Signed, open_body
from peer.net.address_prefix import prefix_of
from peer.net.method import Call
from peer.net.wire import Buffer
from swarm.protocol import messages
from swarm.protocol.head import Head, Member
from swarm.protocol.join_requests import JoinRequests
from swarm.protocol.quorum import HeadCandidate
from swarm.rounds.context import RoundContext
from swarm.rounds.notifier import Notifier
from swarm.rounds.round import Round

JOIN_BEHIND_MAX: Final = 2  # rounds; a joiner so close catches up by replay while the leader waits for its promise
ADDRESSES_MAX: Final = 1024  # learned from one message


class _HeadField(msgspec.Struct, frozen=True):
    """The field that signed plans and contributions have in common."""

    head: Hash


@dataclass(frozen=True)
class RunLimits:
    """What an engine must know of the run."""

    genesis: Head
    authority: str
    """The peer that signs regroups."""
    rounds: int
    """The number of rounds; 0 for no end."""
    max_peers: int
    members_per_prefix: int = MEMBERS_MAX
    """Members of one address prefix in a head at most."""


@dataclass
class EngineState:
    """The engine's current head, phase and round."""

    head: Head
    regroup: Signed | None
    """The first head of the term, signed by the authority."""
    phase: str = "joining"
    round: Round | None = None
    """The round after `head`, once this peer takes part in it."""
    moved: Notifier = field(default_factory=Notifier)
    """Notified when `round` changes."""
    look: trio.Event = field(default_factory=trio.Event)
    """Set when a peer seems to have a later head."""
    offer: HeadCandidate | None = None
    """A regroup that another peer has sent."""

    def report(self, me: Member) -> messages.HeadReport:
        """Return the report of this peer's head."""
        return messages.HeadReport(self.head, me, self.phase, regroup=self.regroup)


class RoundHandlers:
    """Handles the calls of `swarm.protocol.messages`, except the authority's own."""

    def __init__(self, context: RoundContext, run: RunLimits, state: EngineState, join_requests: JoinRequests) -> None:
        self._context, self._run, self._state = context, run, state
        self._join_requests = join_requests

    def _learn(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        for peer, known in list(addresses.items())[:ADDRESSES_MAX]:
            self._context.host.book.add(peer, known)

    def open(self) -> None:
        """Register the handlers."""
        rpc = self._context.host.rpc
        rpc.register(messages.PREPARE, self._on_prepare)
        rpc.register(messages.START_ROUND, self._on_work)
        rpc.register(messages.SUBMIT, self._on_submit)
        rpc.register(messages.START_EXCHANGE, self._on_exchange)
        rpc.register(messages.FINISH, self._on_finish)
        rpc.register(messages.VOTE, self._on_vote)
        rpc.register(messages.CONTRIBUTION, self._on_contribution, self._expect_contribution)
        rpc.register(messages.RESULT, self._on_result, self._expect_result)
        rpc.register(messages.FETCH_RESULT, self._on_fetch)
        rpc.register(messages.HEAD_REPORT, self._on_head_report)
        rpc.register(messages.REQUEST_JOIN, self._on_request_join)
        rpc.register(messages.REGROUP, self._on_regroup)

    def _current(self) -> Round:
        if self._state.round is None:
            raise RoundDiscarded("this peer takes part in no round now")
        return self._state.round

    def _check_group(self, group: str) -> None:
        """Raise `RoundError`, which is no violation, for another group: peers move between groups."""
        if group != self._state.head.run_id:
            raise RoundError("this peer is in another group: look it up again")

    async def _on_prepare(self, call: Call[messages.Prepare]) -> messages.Promise:
        ask = call.body
        self._check_group(ask.head.run_id)
        round_ = self._state.round
        if round_ is None or round_.round_state.head.position < ask.head.position:
            if round_ is None or round_.round_state.signed_plan is not None:
                with trio.move_on_after(0.3):  # usually this peer is about to commit that head
                    await self._reach(ask.head)
            if self._state.head.position < ask.head.position:
                self._state.look.set()
            with trio.move_on_after(self._context.timeouts.answer_s / 2):  # replay takes less time
                await self._reach(ask.head)
        current = self._current()
        if current.round_state.head.hash != ask.head.hash:
            return messages.Promise(granted=False, promised=-1, head=self._state.head, member=self._context.me)
        promise = await current.promise_when_due(ask, call.peer)
        if promise.granted:
            self._learn(ask.addresses)
        return promise

    async def _reach(self, head: Head) -> None:
        while self._state.round is None or self._state.round.round_state.head.position < head.position:
            await self._state.moved.wait(1.0)

    def _named(self, head: bytes) -> Round:
        """Return the round after the head with that hash, or raise `RoundDiscarded`."""
        round_ = self._current()
        if round_.round_state.head.hash != head:
            self._state.look.set()
            raise RoundDiscarded("that round is over or has not begun here")
        return round_

    def _about(self, signed: Signed) -> Round:
        """Return the round of a signed plan or contribution. Naming a round that is over is no violation."""
        try:
            return self._named(msgspec.msgpack.decode(signed.body, type=_HeadField).head)
        except MALFORMED as error:
            raise ProtocolViolation("a plan or contribution names no head") from error

    async def _on_work(self, call: Call[messages.StartRound]) -> messages.Done:
        self._about(call.body.plan).take_work(call.body.plan, call.body.finish_early, call.peer)
        return messages.Done()

    async def _on_submit(self, call: Call[messages.Submit]) -> messages.Done:
        self._about(call.body.contribution).take_submission(call.body.contribution)
        return messages.Done()

    async def _on_exchange(self, call: Call[messages.StartExchange]) -> messages.Done:
        await self._named(call.body.roster.head).begin_exchange(call.body.roster, call.peer)
        return messages.Done()

    async def _on_finish(self, call: Call[messages.Finish]) -> messages.Done:
        await self._named(call.body.roster.head).begin_finish(call.body, call.peer)
        return messages.Done()

    async def _on_vote(self, call: Call[messages.Vote]) -> messages.VoteSeen:
        if self._state.round is not None and self._state.round.round_state.head.hash == call.body.head:
            self._state.round.voting.take(call.body, call.peer)
        elif call.body.head != self._state.head.previous:
            self._state.look.set()
        return messages.VoteSeen(self._state.head.hash)

    async def _expect_contribution(self, peer: str, asked: messages.SliceOf, size_bytes: int) -> None:
        await self._current().expect_contribution(peer, asked, size_bytes)

    async def _expect_result(self, peer: str, asked: messages.SliceOf, size_bytes: int) -> None:
        await self._current().expect_result(peer, asked, size_bytes)

    async def _on_contribution(self, call: Call[messages.SliceOf]) -> messages.Done:
        return await self._current().take_contribution(call)

    async def _on_result(self, call: Call[messages.SliceOf]) -> messages.Done:
        return await self._current().take_result(call)

    async def _on_fetch(self, call: Call[messages.SliceOf]) -> tuple[messages.Done, Buffer]:
        exchange = self._current().round_state.exchanges.get(call.body.key)
        if exchange is None or call.body.index not in exchange.results:
            raise RoundDiscarded("this peer does not have that result")
        return messages.Done(), exchange.results[call.body.index]

    async def _on_head_report(self, call: Call[messages.AskHead]) -> messages.HeadReport:
        if call.body.group:
            self._check_group(call.body.group)
        return self._state.report(self._context.me)

    async def _on_request_join(self, call: Call[messages.JoinRequest]) -> messages.HeadReport:
        request_join = call.body
        if request_join.group:
            self._check_group(request_join.group)
        if request_join.member.peer != call.peer:
            raise ProtocolViolation("a join request names another peer than its sender")
        self._context.host.learn(call.peer, request_join.addresses, told_by=call.peer)
        near = (
            request_join.head == self._state.head.hash
            or 0 < self._state.head.round - request_join.round <= JOIN_BEHIND_MAX
        )
        if near:
            self._join_requests.add(request_join.member, prefix_of(self._context.host.remote_ip(call.peer)))
        return self._state.report(self._context.me)

    async def _on_regroup(self, call: Call[messages.Regroup]) -> messages.HeadReport:
        """Consider a new term. Any peer may pass on the authority's signed head."""
        head = open_body(call.body.signed, messages.REGROUP_KIND, Head, signer=self._run.authority)
        self._check_group(head.run_id)
        if head.position > self._state.head.position:
            self._learn(call.body.addresses)
            self._state.offer = HeadCandidate(head, (call.peer,), call.body.signed)
            self._state.look.set()
        return self._state.report(self._context.me)
