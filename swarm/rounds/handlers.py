"""What a peer answers others about rounds: each call goes to the round it is about, if that is ours.

A call that names a head we do not have makes us look where the run stands (`EngineState.look`); it never makes us go
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from peer.errors import ProtocolViolation, RoundDiscarded, RoundError
from peer.identity import Signed, open_body
from peer.net.method import Call
from peer.net.wire import Buffer
from swarm.protocol import messages as say
from swarm.protocol.head import Hash, Head, Member
from swarm.protocol.join_requests import JoinRequests
from swarm.protocol.quorum import HeadCandidate
from swarm.rounds.context import RoundContext
from swarm.rounds.round import Round
from swarm.rounds.round_state import Notifier

JOIN_BEHIND_MAX: Final = 2  # rounds: who is that near catches up by replay while its promise is waited for
ADDRESSES_MAX: Final = 1024  # learnt from one message


class _About(msgspec.Struct, frozen=True):
    """What signed plans and contributions have in common."""

    head: Hash


@dataclass(frozen=True)
class RunLimits:
    """What an engine must know of the run: its genesis, who signs regroups, after how many rounds it ends (0: never),
    how many peers may take part."""

    genesis: Head
    authority: str
    rounds: int
    max_peers: int


@dataclass
class EngineState:
    """Where this peer stands: `head`, the authority's signature of its term (`regroup`), what it is doing (`phase`),
    and the round after the head, once it takes part in it. `moved`: to another head; `look` is set when somebody seems
    to be further on; `offer`: a regroup that was pushed to us."""

    head: Head
    regroup: Signed | None
    phase: str = "joining"
    round: Round | None = None
    join_requests: JoinRequests = field(default_factory=JoinRequests)
    moved: Notifier = field(default_factory=Notifier)
    look: trio.Event = field(default_factory=trio.Event)
    offer: HeadCandidate | None = None

    def report(self, me: Member) -> say.HeadReport:
        return say.HeadReport(self.head, me, self.phase, self.regroup)


class RoundHandlers:
    """Serves `swarm.protocol.messages`, but for the authority's own."""

    def __init__(self, context: RoundContext, run: RunLimits, here: EngineState) -> None:
        self._context, self._run, self._state = context, run, here

    def _learn(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        for peer, known in list(addresses.items())[:ADDRESSES_MAX]:
            self._context.host.book.add(peer, known)

    def open(self) -> None:
        """Answer from now on."""
        rpc = self._context.host.rpc
        rpc.register(say.PREPARE, self._on_prepare)
        rpc.register(say.START_ROUND, self._on_work)
        rpc.register(say.SUBMIT, self._on_submit)
        rpc.register(say.START_EXCHANGE, self._on_exchange)
        rpc.register(say.FINISH, self._on_finish)
        rpc.register(say.VOTE, self._on_vote)
        rpc.register(say.CONTRIBUTION, self._on_contribution)
        rpc.register(say.RESULT, self._on_result)
        rpc.register(say.FETCH_RESULT, self._on_fetch)
        rpc.register(say.HEAD_REPORT, self._on_head_report)
        rpc.register(say.REQUEST_JOIN, self._on_request_join)
        rpc.register(say.REGROUP, self._on_regroup)

    def _current(self) -> Round:
        if self._state.round is None:
            raise RoundDiscarded("this peer takes part in no round at the moment")
        return self._state.round

    def _check_group(self, group: str) -> None:
        """A plain refusal: peers move between groups, and word of it takes a while."""
        if group != self._state.head.run_id:
            raise RoundError("this peer is in another group: look it up again")

    async def _on_prepare(self, call: Call[say.Prepare]) -> say.Promise:
        ask = call.body
        self._check_group(ask.head.run_id)
        round_ = self._state.round
        if round_ is None or round_.round_state.head.position < ask.head.position:
            if round_ is None or round_.round_state.signed_plan is not None:
                with trio.move_on_after(0.3):  # usually we are about to commit that very head ourselves
                    await self._reach(ask.head)
            if self._state.head.position < ask.head.position:
                self._state.look.set()
            with trio.move_on_after(self._context.timeouts.answer_s / 2):  # catching up by replay takes less
                await self._reach(ask.head)
        current = self._current()
        if current.round_state.head.hash != ask.head.hash:
            return say.Promise(granted=False, promised=-1, head=self._state.head, member=self._context.me)
        promise = await current.promise_when_due(ask, call.peer)
        if promise.granted:
            self._learn(ask.addresses)
        return promise

    async def _reach(self, head: Head) -> None:
        while self._state.round is None or self._state.round.round_state.head.position < head.position:
            await self._state.moved.wait(1.0)

    def _named(self, head: bytes) -> Round:
        """The round, if it is the one that the call is about."""
        round_ = self._current()
        if round_.round_state.head.hash != head:
            self._state.look.set()
            raise RoundDiscarded("that round is over, or not begun here")
        return round_

    def _about(self, signed: Signed) -> Round:
        """The round of a signed plan or contribution; nobody's offence if it is one that we have left."""
        try:
            return self._named(msgspec.msgpack.decode(signed.body, type=_About).head)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation("a plan or contribution names no head") from error

    async def _on_work(self, call: Call[say.StartRound]) -> say.Done:
        self._about(call.body.plan).take_work(call.body.plan, call.body.finish_early, call.peer)
        return say.Done()

    async def _on_submit(self, call: Call[say.Submit]) -> say.Done:
        self._about(call.body.contribution).take_submission(call.body.contribution)
        return say.Done()

    async def _on_exchange(self, call: Call[say.StartExchange]) -> say.Done:
        await self._named(call.body.roster.head).begin_exchange(call.body.roster, call.peer)
        return say.Done()

    async def _on_finish(self, call: Call[say.Finish]) -> say.Done:
        await self._named(call.body.roster.head).begin_finish(call.body, call.peer)
        return say.Done()

    async def _on_vote(self, call: Call[say.Vote]) -> say.VoteSeen:
        if self._state.round is not None and self._state.round.round_state.head.hash == call.body.head:
            self._state.round.voting.take(call.body, call.peer)
        elif call.body.head != self._state.head.previous:
            self._state.look.set()
        return say.VoteSeen(self._state.head.hash)

    async def _on_contribution(self, call: Call[say.SliceOf]) -> say.Done:
        return await self._current().take_contribution(call)

    async def _on_result(self, call: Call[say.SliceOf]) -> say.Done:
        return await self._current().take_result(call)

    async def _on_fetch(self, call: Call[say.SliceOf]) -> tuple[say.Done, Buffer]:
        exchange = self._current().round_state.exchanges.get(call.body.key)
        if exchange is None or call.body.index not in exchange.results:
            raise RoundDiscarded("that result is not here")
        return say.Done(), exchange.results[call.body.index]

    async def _on_head_report(self, call: Call[say.AskHead]) -> say.HeadReport:
        if call.body.group:
            self._check_group(call.body.group)
        return self._state.report(self._context.me)

    async def _on_request_join(self, call: Call[say.JoinRequest]) -> say.HeadReport:
        request_join = call.body
        if request_join.group:
            self._check_group(request_join.group)
        if request_join.member.peer != call.peer:
            raise ProtocolViolation("a knock names another peer than its sender")
        self._context.host.book.add(call.peer, request_join.addresses)
        near = (
            request_join.head == self._state.head.hash
            or 0 < self._state.head.round - request_join.round <= JOIN_BEHIND_MAX
        )
        if near:
            self._state.join_requests.request_join(request_join.member)
        return self._state.report(self._context.me)

    async def _on_regroup(self, call: Call[say.Regroup]) -> say.HeadReport:
        """The authority (or whoever passes its signature on) begins a new term."""
        head = open_body(call.body.signed, say.REGROUP_KIND, Head, signer=self._run.authority)
        self._check_group(head.run_id)
        if head.position > self._state.head.position:
            self._learn(call.body.addresses)
            self._state.offer = HeadCandidate(head, (call.peer,), call.body.signed)
            self._state.look.set()
        return self._state.report(self._context.me)
