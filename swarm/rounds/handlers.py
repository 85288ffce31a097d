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

KNOCK_BEHIND_MAX: Final = 2  # rounds: who is that near catches up by replay while its promise is waited for
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
    knockers: JoinRequests = field(default_factory=JoinRequests)
    moved: Notifier = field(default_factory=Notifier)
    look: trio.Event = field(default_factory=trio.Event)
    offer: HeadCandidate | None = None

    def standing(self, me: Member) -> say.HeadReport:
        return say.HeadReport(self.head, me, self.phase, self.regroup)


class RoundHandlers:
    """Serves `swarm.protocol.messages`, but for the authority's own."""

    def __init__(self, post: RoundContext, run: RunLimits, here: EngineState) -> None:
        self._post, self._run, self._here = post, run, here

    def _learn(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        for peer, known in list(addresses.items())[:ADDRESSES_MAX]:
            self._post.host.book.add(peer, known)

    def open(self) -> None:
        """Answer from now on."""
        rpc = self._post.host.rpc
        rpc.serve(say.PREPARE, self._on_prepare)
        rpc.serve(say.WORK, self._on_work)
        rpc.serve(say.HAND_IN, self._on_hand_in)
        rpc.serve(say.EXCHANGE, self._on_exchange)
        rpc.serve(say.FINISH, self._on_finish)
        rpc.serve(say.VOTE, self._on_vote)
        rpc.serve(say.CONTRIBUTION, self._on_contribution)
        rpc.serve(say.RESULT, self._on_result)
        rpc.serve(say.FETCH_RESULT, self._on_fetch)
        rpc.serve(say.STANDING, self._on_standing)
        rpc.serve(say.KNOCK, self._on_knock)
        rpc.serve(say.REGROUP, self._on_regroup)

    def _current(self) -> Round:
        if self._here.round is None:
            raise RoundDiscarded("this peer takes part in no round at the moment")
        return self._here.round

    def _check_group(self, group: str) -> None:
        """A plain refusal: peers move between groups, and word of it takes a while."""
        if group != self._here.head.run_id:
            raise RoundError("this peer is in another group: look it up again")

    async def _on_prepare(self, call: Call[say.Prepare]) -> say.Promise:
        ask = call.body
        self._check_group(ask.head.run_id)
        round_ = self._here.round
        if round_ is None or round_.height.head.height < ask.head.height:
            if round_ is None or round_.height.signed_plan is not None:
                with trio.move_on_after(0.3):  # usually we are about to commit that very head ourselves
                    await self._reach(ask.head)
            if self._here.head.height < ask.head.height:
                self._here.look.set()
            with trio.move_on_after(self._post.tempo.answer_s / 2):  # catching up by replay takes less
                await self._reach(ask.head)
        current = self._current()
        if current.height.head.hash != ask.head.hash:
            return say.Promise(granted=False, promised=-1, head=self._here.head, member=self._post.me)
        promise = await current.promise_when_due(ask, call.peer)
        if promise.granted:
            self._learn(ask.addresses)
        return promise

    async def _reach(self, head: Head) -> None:
        while self._here.round is None or self._here.round.height.head.height < head.height:
            await self._here.moved.wait(1.0)

    def _named(self, head: bytes) -> Round:
        """The round, if it is the one that the call is about."""
        round_ = self._current()
        if round_.height.head.hash != head:
            self._here.look.set()
            raise RoundDiscarded("that round is over, or not begun here")
        return round_

    def _about(self, signed: Signed) -> Round:
        """The round of a signed plan or contribution; nobody's offence if it is one that we have left."""
        try:
            return self._named(msgspec.msgpack.decode(signed.body, type=_About).head)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation("a plan or contribution names no head") from error

    async def _on_work(self, call: Call[say.Work]) -> say.Done:
        self._about(call.body.plan).take_work(call.body.plan, call.body.wrap_up, call.peer)
        return say.Done()

    async def _on_hand_in(self, call: Call[say.HandIn]) -> say.Done:
        self._about(call.body.contribution).take_hand_in(call.body.contribution)
        return say.Done()

    async def _on_exchange(self, call: Call[say.Exchange]) -> say.Done:
        await self._named(call.body.roster.head).begin_exchange(call.body.roster, call.peer)
        return say.Done()

    async def _on_finish(self, call: Call[say.Finish]) -> say.Done:
        await self._named(call.body.roster.head).begin_finish(call.body, call.peer)
        return say.Done()

    async def _on_vote(self, call: Call[say.Vote]) -> say.VoteSeen:
        if self._here.round is not None and self._here.round.height.head.hash == call.body.head:
            self._here.round.voting.take(call.body, call.peer)
        elif call.body.head != self._here.head.previous:
            self._here.look.set()
        return say.VoteSeen(self._here.head.hash)

    async def _on_contribution(self, call: Call[say.SliceOf]) -> say.Done:
        return await self._current().take_contribution(call)

    async def _on_result(self, call: Call[say.SliceOf]) -> say.Done:
        return await self._current().take_result(call)

    async def _on_fetch(self, call: Call[say.SliceOf]) -> tuple[say.Done, Buffer]:
        exchange = self._current().height.exchanges.get(call.body.key)
        if exchange is None or call.body.index not in exchange.results:
            raise RoundDiscarded("that result is not here")
        return say.Done(), exchange.results[call.body.index]

    async def _on_standing(self, call: Call[say.AskHead]) -> say.HeadReport:
        if call.body.group:
            self._check_group(call.body.group)
        return self._here.standing(self._post.me)

    async def _on_knock(self, call: Call[say.Knock]) -> say.HeadReport:
        knock = call.body
        if knock.group:
            self._check_group(knock.group)
        if knock.member.peer != call.peer:
            raise ProtocolViolation("a knock names another peer than its sender")
        self._post.host.book.add(call.peer, knock.addresses)
        near = knock.head == self._here.head.hash or 0 < self._here.head.round - knock.round <= KNOCK_BEHIND_MAX
        if near:
            self._here.knockers.knock(knock.member)
        return self._here.standing(self._post.me)

    async def _on_regroup(self, call: Call[say.Regroup]) -> say.HeadReport:
        """The authority (or whoever passes its signature on) begins a new term."""
        head = open_body(call.body.signed, say.REGROUP_KIND, Head, signer=self._run.authority)
        self._check_group(head.run_id)
        if head.height > self._here.head.height:
            self._learn(call.body.addresses)
            self._here.offer = HeadCandidate(head, (call.peer,), call.body.signed)
            self._here.look.set()
        return self._here.standing(self._post.me)
