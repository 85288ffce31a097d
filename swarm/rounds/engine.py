"""A peer's life in a run, head after head: take part in rounds, or catch up and knock until the group plans for it.

One `Round` is alive at a time. Calls from other peers are routed to it by the head they name; a call that names a
head we do not have makes us look where the run stands, but only what `swarm.protocol.quorum` accepts makes us leave
the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import trio

from optim.strategies.interface import Coding
from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RemoteError, RoundError
from peer.identity import Signed
from peer.net.rpc_server import BUSY
from swarm.protocol import messages
from swarm.protocol.head import TRIES_PER_LEADER, Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.quorum import ASKED_MAX, HeadCandidate, Viewpoint, ask_head_reports, weigh
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.handlers import EngineState, RoundHandlers, RunLimits
from swarm.rounds.leader import Leader, NoMajority
from swarm.rounds.round import Nurseries, Round
from swarm.rounds.round_state import RoundState

JOIN_REQUEST_EVERY_S: Final = 1.0
SEE_OFF_EVERY_S: Final = 0.2  # whoever has seen all others at the run's end is gone within a second
LEADER_LEFT_S: Final = 1.0  # how often it is looked whether a pipeline's leader has moved to another stage
LOOK_AROUND_S: Final = 5.0  # a member whose round does not move looks whether the run is elsewhere
LOOK_PAUSE_S: Final = 0.1  # after a look for nothing, then doubled: a burst of calls must not become a burst of polls
ASK_AUTHORITY_EVERY_S: Final = 1.5


class CommitListener(Protocol):
    """Who keeps and fetches states on the engine's behalf (`swarm.training.peer`)."""

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        """The state of `head` is now current; `results` are the encoded merged slices that led to it."""

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        """Bring the outer state to that of `candidate.head`. `NetworkError` if no donor could deliver it."""

    def known_peers(self) -> Iterable[str]:
        """Peers of this run seen lately, besides the members of the current head."""


class Engine:
    """`run()` takes part until the run's number of rounds is committed."""

    def __init__(
        self, context: RoundContext, run: RunLimits, head: Head, regroup: Signed | None, keeper: CommitListener
    ) -> None:
        self._state = here = EngineState(head, regroup)
        self._context = context
        self._listener = keeper
        self._run = run
        self._contributor = Contributor(context)
        self.counted: tuple[tuple[Range, ...], ...] = ()
        """In a pipeline: the samples of each contribution that the last commit has merged."""
        RoundHandlers(context, run, here).open()

    async def run(self) -> None:
        round_state: RoundState | None = None
        async with trio.open_nursery() as lingering:
            while not self._run.rounds or self.head.round < self._run.rounds:
                round_state = RoundState(self.head, self._context.me, round_state)
                better: list[HeadCandidate] = []
                coding = await self._coding()
                async with trio.open_nursery() as tasks:
                    nurseries = Nurseries(tasks, lingering)
                    round_ = Round(self._context, round_state, coding, self._contributor, nurseries, self._look_again)
                    self._state.round = round_
                    self._state.moved.notify()
                    try:
                        better += await self._live(round_)
                    finally:
                        round_.close()
                    tasks.cancel_scope.cancel()
                if round_state.decided is not None:
                    await self._commit(round_, round_state.decided)
                else:
                    await round_.abandon()
                    if round_state.plan is not None and better[0].head.term > self.head.term:
                        round_.discard("the group was regrouped")
                    await self._catch_up(round_state, better[0])
            self._state.phase = "finished"
            self._state.round = None
            await self._serve_stragglers()
            lingering.cancel_scope.cancel()

    async def _coding(self) -> Coding:
        """How the messages of the next round are coded; where that depends on the state it takes a while."""
        state = self._context.state
        return await trio.to_thread.run_sync(
            state.strategy.coding, self._context.schedule.round_info(self.head), state.tensors
        )

    def _look_again(self) -> None:
        self._state.look.set()

    @property
    def head(self) -> Head:
        return self._state.head

    @property
    def regroup(self) -> Signed | None:
        """The authority's signature of the head's term."""
        return self._state.regroup

    @property
    def phase(self) -> str:
        return self._state.phase

    @property
    def takes_part(self) -> bool:
        """Whether the group counts on this peer: as a member, or as somebody whom the present plan takes in."""
        round_, me = self._state.round, self._context.me
        plan = round_.round_state.plan if round_ is not None else None
        return self.head.has(me) or (plan is not None and plan.of(me) is not None)

    def _ready(self) -> dict[str, Member]:
        """Who wants to be planned for."""
        return self._state.join_requests.ready(self._run.max_peers - len(self.head.members))

    # -- one head ----------------------------------------------------------------------------------------------------

    async def _live(self, round_: Round) -> list[HeadCandidate]:
        """Returns when the round is decided (empty), or with a better head that was found elsewhere."""
        better: list[HeadCandidate] = []
        part = self._lead_or_follow if round_.round_state.head.has(self._context.me) else self._request_join

        async def take_part() -> None:
            await part(round_)
            nursery.cancel_scope.cancel()

        async def look_around() -> None:
            better.append(await self._look_around(round_))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_part)
            nursery.start_soon(look_around)
        return [] if round_.round_state.decided is not None else better

    async def _lead_or_follow(self, round_: Round) -> None:
        """A member's part: see to it that some attempt of the round is led, by itself if it comes to that."""
        round_state, head, host = round_.round_state, round_.round_state.head, self._context.host
        host.watch(m.peer for m in head.members if m != self._context.me)
        leader = Leader(round_, self._ready)
        floor = 0
        while round_state.decided is None:
            floor = max(floor, round_state.acceptor.promised)
            attempt = round_state.awaited_attempt = head.next_attempt(floor, host.suspects)
            round_.election_timeout.follow(head.leader(attempt).peer)
            if head.leader(attempt) == self._context.me:
                self._state.phase = "leading"
                floor = attempt + 1
                try:
                    await leader.lead(attempt)
                except NoMajority as error:
                    await self._wait_for_majority(round_, str(error))
                except (RoundError, ProtocolViolation) as error:
                    self._context.events.emit("attempt_failed", round=round_.number, attempt=attempt, reason=str(error))
                if leader.ahead is not None:
                    self._state.look.set()
            else:
                self._state.phase = "training"
                await self._follow(round_state, attempt)
                if round_state.acceptor.promised <= attempt:
                    floor = (attempt // TRIES_PER_LEADER + 1) * TRIES_PER_LEADER

    async def _follow(self, round_state: RoundState, attempt: int) -> None:
        """Wait while the leader of `attempt` makes progress."""
        leader = round_state.head.leader(attempt).peer
        if round_state.awaited_leader != leader:  # else it has its time: it may have been quicker than we are
            round_state.expect_progress_within(2 * self._context.timeouts.answer_s, leader)
        async with trio.open_nursery() as nursery:
            if self._context.schedule.pipeline:
                nursery.start_soon(self._see_whether_it_left, round_state, leader)
            while round_state.decided is None and round_state.acceptor.promised <= attempt:
                if leader in self._context.host.suspects or trio.current_time() > round_state.step_deadline:
                    break
                await round_state.changed.until(lambda: round_state.decided is not None, 0.25)
            nursery.cancel_scope.cancel()

    async def _see_whether_it_left(self, round_state: RoundState, leader: str) -> None:
        """A leader that moves to another stage is alive, and leads no more: then its time is over."""
        ask = messages.AskHead(round_state.head.run_id)
        while True:
            await trio.sleep(LEADER_LEFT_S)
            try:
                await self._context.host.rpc.call(
                    leader, messages.HEAD_REPORT, ask, timeout_s=self._context.timeouts.answer_s
                )
            except RemoteError as error:
                if error.code != BUSY:
                    round_state.expect_progress_within(0.0, leader)
                    return
            except BarnraiseError:
                continue  # the heartbeat will tell

    async def _request_join(self, round_: Round) -> None:
        """A joiner's part: tell the members that we hold their head's state, until a round that has us is decided."""
        round_state, context = round_.round_state, self._context
        self._state.phase = "joining"
        head = round_state.head
        request_join = messages.JoinRequest(head.hash, head.round, context.me, context.host.addresses, head.run_id)
        while round_state.decided is None:
            doors = [*(m.peer for m in head.members), self._run.authority]
            async with trio.open_nursery() as nursery:
                for door in doors:
                    nursery.start_soon(self._request_join_at, door, request_join, head.position)
            await round_state.changed.until(lambda: round_state.decided is not None, JOIN_REQUEST_EVERY_S)

    async def _request_join_at(self, door: str, request_join: messages.JoinRequest, round_state: tuple[int, int]) -> None:
        try:
            reply = await self._context.host.rpc.call(
                door, messages.REQUEST_JOIN, request_join, timeout_s=self._context.timeouts.answer_s
            )
        except BarnraiseError:
            return
        if (
            reply.body.head.position > round_state
        ):  # the authority's is that of the last regroup: older than ours, as a rule
            self._state.look.set()

    async def _look_around(self, round_: Round) -> HeadCandidate:
        """Look where the run stands when somebody seems to be further on, and now and then anyway; returns what is.

        Vain looks that others make us take come ever more slowly; a quiet while ends that, so that a joiner sees the
        next commit in time for the round after it."""
        head = round_.round_state.head
        pause_s = LOOK_PAUSE_S
        while True:
            with trio.move_on_after(LOOK_AROUND_S) as quiet:
                await self._state.look.wait()
            self._state.look = trio.Event()
            best, self._state.offer = self._state.offer or await self.best_candidate(), None
            if best is not None and best.head.position > head.position and best.head.hash != head.hash:
                return best
            if quiet.cancelled_caught:
                pause_s = LOOK_PAUSE_S
                continue
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AROUND_S / 2)

    async def best_candidate(self) -> HeadCandidate | None:
        """The head that counts most among all the peers we know of."""
        me = self._context.me.peer
        peers = [m.peer for m in self.head.members] + [self._run.authority] + list(self._listener.known_peers())
        suspects = self._context.host.suspects
        mine, view = (me, self._state.report(self._context.me)), Viewpoint(self._context.me, self.head)

        def weighed(head_reports: list[tuple[str, messages.HeadReport]], unheard: int = 0) -> list[HeadCandidate]:
            return weigh([*head_reports, mine], self._run.authority, self._run.genesis, view, unheard)

        def enough(head_reports: list[tuple[str, messages.HeadReport]], unheard: int) -> bool:
            """A majority further on is worth following at once; whoever is frozen would hold up the answer. What only
            the authority of a pipeline's small groups remembers is often long past, and nobody has its state any more.
            """
            best = weighed(head_reports, unheard)[:1]
            past = self._context.schedule.pipeline and best and set(best[0].holders) == {self._run.authority}
            if past and best[0].head.state_hash != self.head.state_hash:
                return False
            return any(s.head.position > self.head.position for s in best)

        others = [peer for peer in peers if peer != me and peer not in suspects]
        rpc, most = self._context.host.rpc, len(self.head.members) + ASKED_MAX
        candidates = weighed(await ask_head_reports(rpc, others, group=self.head.run_id, enough=enough, most=most))
        return candidates[0] if candidates else None

    async def _wait_for_majority(self, round_: Round, reason: str) -> None:
        """Too few members are left to go on: only the authority may regroup us. Wait, and say so."""
        self._state.phase = messages.NO_MAJORITY
        self._context.events.emit("majority_lost", round=round_.number, reason=reason)
        try:
            ask = messages.AskHead(self.head.run_id)
            reply = await self._context.host.rpc.call(
                self._run.authority, messages.NEED_REGROUP, ask, timeout_s=self._context.timeouts.answer_s
            )
            if reply.body.head.position > round_.round_state.head.position:
                self._state.look.set()
        except BarnraiseError as error:
            self._context.events.emit("authority_unreachable", round=round_.number, reason=str(error))
        await trio.sleep(ASK_AUTHORITY_EVERY_S)

    # -- changing heads ----------------------------------------------------------------------------------------------

    async def _commit(self, round_: Round, head: Head) -> None:
        exchange = round_.round_state.built_by
        assert exchange is not None
        self._context.state.commit(head.state_hash)
        self._state.head = head
        round_.end(head)
        self._state.join_requests.settle(exchange.merge.plan, head)
        self.counted = tuple(body.counted for body in exchange.merge.merged())
        results = [exchange.results[i] for i in sorted(exchange.results)]
        await self._listener.committed(head, results)

    async def _catch_up(self, round_state: RoundState, candidate: HeadCandidate) -> None:
        """Move to a head that others committed: by our own sealed result, by a change of term, or by fetching. If that
        fails we stay where we are, unless the state has moved on part of the way."""
        self._state.phase = "catching up"
        state = self._context.state
        while True:
            head = candidate.head
            try:
                if head.state_hash == state.tree.root:
                    break
                if round_state.candidate is not None and round_state.candidate.hash == head.hash:
                    state.commit(head.state_hash)
                else:
                    round_state.candidate = None  # its state is written over by what is fetched
                    await self._listener.fetch(candidate, self.head)
                break
            except (NetworkError, ProtocolViolation) as error:
                self._context.events.emit("catch_up_failed", round=head.round, reason=str(error))
                await trio.sleep(JOIN_REQUEST_EVERY_S)
            if state.tree.root == self.head.state_hash:
                return
            candidate = await self.best_candidate() or candidate
        self._state.head, self._state.regroup = head, candidate.regroup
        await self._listener.committed(head, [])

    async def _serve_stragglers(self) -> None:
        """The run is complete: stay until every member of the last head is there too, but not for ever."""
        rpc, head, me = self._context.host.rpc, self.head, self._context.me
        missing = {member.peer for member in head.members if member != me}
        with trio.move_on_after(4 * self._context.timeouts.answer_s):
            while missing:  # whoever was seen there may leave before the others are, or before we have seen it
                gone: set[str] = set()
                head_reports = await ask_head_reports(rpc, missing, group=head.run_id, most=len(missing), gone=gone)
                missing -= gone.union(peer for peer, report in head_reports if report.head.hash == head.hash)
                if missing:
                    await trio.sleep(SEE_OFF_EVERY_S)
