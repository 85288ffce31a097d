"""The engine runs rounds until the training run is complete.

For each head the peer either takes part in the next round (as member or leader), asks to join the group, or catches up
with a later head. One `Round` is alive at a time; calls of other peers are routed to it by the head they name. A call
that names another head makes the engine look for the run's current head. Only a head that `swarm.protocol.quorum`
accepts makes it leave the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import trio

from optim.strategies.interface import Coding
from peer.errors import BarnraiseError, NetworkError, NoQuorum, ProtocolViolation, RemoteError, RoundError
from peer.identity import Signed
from peer.net.address_prefix import announced_prefixes, prefix_of
from peer.net.rpc_server import BUSY
from swarm.protocol import messages
from swarm.protocol.head import TRIES_PER_LEADER, Head, Member
from swarm.protocol.join_requests import JoinRequests
from swarm.protocol.ledger import Range
from swarm.protocol.prefix_cap import FullPrefixes
from swarm.protocol.quorum import ASKED_MAX, HeadCandidate, ask_head_reports, rank_heads
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.handlers import EngineState, RoundHandlers, RunLimits
from swarm.rounds.leader import Leader
from swarm.rounds.round import Round
from swarm.rounds.round_state import RoundState

JOIN_REQUEST_EVERY_S: Final = 1.0
WAIT_FOR_OTHERS_EVERY_S: Final = 0.2  # short, since a peer that has seen all others at the last head leaves at once
LEADER_LEFT_S: Final = 1.0  # interval of checks whether a pipeline's leader has moved to another stage
LOOK_AROUND_S: Final = 5.0  # a peer whose round does not move looks for a later head
LOOK_PAUSE_S: Final = 0.1  # after a vain look, doubled each time: a burst of calls must not cause a burst of polls
ASK_AUTHORITY_EVERY_S: Final = 1.5


class CommitListener(Protocol):
    """Stores and fetches states for the engine (`swarm.training.replica`)."""

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        """Take note that `head` is committed; `results` are the encoded merged slices that led to its state."""

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        """Bring the outer state to that of `candidate.head`. Raises `NetworkError` if no donor could deliver it."""

    def known_peers(self) -> Iterable[str]:
        """Return the peers of this run seen lately, besides the members of the current head."""


class Engine:
    """Takes part in rounds until the run's number of rounds is committed."""

    def __init__(
        self, context: RoundContext, run: RunLimits, head: Head, regroup: Signed | None, listener: CommitListener
    ) -> None:
        self._state = EngineState(head, regroup)
        self._join_requests = JoinRequests(run.members_per_prefix)
        self._full_prefixes = FullPrefixes()
        self._context = context
        self._listener = listener
        self._run = run
        self._contributor = Contributor(context)
        self.counted: tuple[tuple[Range, ...], ...] = ()
        """In a pipeline, the samples of each contribution that the last commit has merged."""
        RoundHandlers(context, run, self._state, self._join_requests).open()

    async def run(self) -> None:
        """Run rounds until the run is complete."""
        round_state: RoundState | None = None
        async with trio.open_nursery() as lingering:
            while not self._run.rounds or self.head.round < self._run.rounds:
                round_state = RoundState(self.head, self._context.me, round_state)
                better: list[HeadCandidate] = []
                coding = await self._coding()
                async with trio.open_nursery() as tasks:
                    round_ = Round(
                        self._context, round_state, coding, self._contributor, tasks, lingering, self._look_again
                    )
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
            await self._wait_for_others()
            lingering.cancel_scope.cancel()

    async def _coding(self) -> Coding:
        """Return how the updates of the next round are coded. This takes a while if it depends on the state."""
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
        """The first head of the present term, signed by the authority."""
        return self._state.regroup

    @property
    def phase(self) -> str:
        return self._state.phase

    @property
    def takes_part(self) -> bool:
        """Whether this peer is a member of the group, or the present plan takes it in."""
        round_, me = self._state.round, self._context.me
        plan = round_.round_state.plan if round_ is not None else None
        return self.head.has(me) or (plan is not None and plan.of(me) is not None)

    def _ready(self) -> dict[str, Member]:
        """Return the peers that ask to join and may, by peer id."""
        host, members = self._context.host, [m.peer for m in self.head.members if m != self._context.me]
        staying = [prefix_of(host.remote_ip(peer)) for peer in members if peer in host.connected]
        staying += announced_prefixes(host.addresses)  # the leader does not see its own address
        admission = self._join_requests.ready(self._run.max_peers - len(self.head.members), staying)
        for prefix, waiting in self._full_prefixes.fresh(admission).items():
            most = self._run.members_per_prefix
            host.events.emit("prefix_full", round=self.head.round, prefix=prefix, waiting=waiting, most=most)
        return {member.peer: member for member in admission.admitted}

    # -- one head ----------------------------------------------------------------------------------------------------

    async def _live(self, round_: Round) -> list[HeadCandidate]:
        """Take part until the round is decided (returns an empty list) or a better head is found elsewhere."""
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
        """Take part as a member: lead an attempt, or follow its leader, until the round is decided."""
        round_state, head, host = round_.round_state, round_.round_state.head, self._context.host
        host.watch(m.peer for m in head.members if m != self._context.me)
        host.admissions.trust("head", (member.peer for member in head.members))
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
                except NoQuorum as error:
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
        if round_state.awaited_leader != leader:  # else the leader was quicker and has its deadline already
            round_state.expect_progress_within(2 * self._context.timeouts.answer_s, leader)
        async with trio.open_nursery() as nursery:
            if self._context.schedule.pipeline:
                nursery.start_soon(self._watch_for_leaving, round_state, leader)
            while round_state.decided is None and round_state.acceptor.promised <= attempt:
                if leader in self._context.host.suspects or trio.current_time() > round_state.step_deadline:
                    break
                await round_state.changed.until(lambda: round_state.decided is not None, 0.25)
            nursery.cancel_scope.cancel()

    async def _watch_for_leaving(self, round_state: RoundState, leader: str) -> None:
        """End the leader's time if it has moved to another stage: it is alive, but leads no more."""
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
                continue  # the heartbeat finds dead peers

    async def _request_join(self, round_: Round) -> None:
        """Ask to join: tell the members that this peer holds their head's state, until the round is decided."""
        round_state, context = round_.round_state, self._context
        self._state.phase = "joining"
        head = round_state.head
        request_join = messages.JoinRequest(head.hash, head.round, context.me, context.host.addresses, head.run_id)
        while round_state.decided is None:
            asked = [*(m.peer for m in head.members), self._run.authority]
            async with trio.open_nursery() as nursery:
                for peer in asked:
                    nursery.start_soon(self._request_join_at, peer, request_join, head.position)
            await round_state.changed.until(lambda: round_state.decided is not None, JOIN_REQUEST_EVERY_S)

    async def _request_join_at(self, peer: str, request: messages.JoinRequest, position: tuple[int, int]) -> None:
        try:
            reply = await self._context.host.rpc.call(
                peer, messages.REQUEST_JOIN, request, timeout_s=self._context.timeouts.answer_s
            )
        except BarnraiseError:
            return
        if reply.body.head.position > position:  # the authority's is usually older: that of the last regroup
            self._state.look.set()

    async def _look_around(self, round_: Round) -> HeadCandidate:
        """Look for a better head when a peer seems to have one, and every `LOOK_AROUND_S`; return it.

        Each vain look that a call has caused doubles the pause before the next. A quiet `LOOK_AROUND_S` ends that, so
        that a joiner sees the next commit in time for the round after it."""
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
        """Return the best head among all known peers, or None."""
        me = self._context.me.peer
        peers = [m.peer for m in self.head.members] + [self._run.authority] + list(self._listener.known_peers())
        suspects = self._context.host.suspects
        head, mine, run = self.head, (me, self._state.report(self._context.me)), self._run

        def ranked(head_reports: list[tuple[str, messages.HeadReport]], unheard: int = 0) -> list[HeadCandidate]:
            reports = [*head_reports, mine]
            return rank_heads(reports, run.authority, run.genesis, self._context.me, head, unheard)

        def enough(head_reports: list[tuple[str, messages.HeadReport]], unheard: int) -> bool:
            """End the poll at a later head with a majority: waiting for frozen peers would only delay the answer.

            A head that only the authority of a pipeline reports does not count here. In small groups it is often old,
            and no peer has its state any more."""
            best = ranked(head_reports, unheard)[:1]
            past = self._context.schedule.pipeline and best and set(best[0].holders) == {self._run.authority}
            if past and best[0].head.state_hash != self.head.state_hash:
                return False
            return any(s.head.position > self.head.position for s in best)

        others = [peer for peer in peers if peer != me and peer not in suspects]
        rpc, most = self._context.host.rpc, len(self.head.members) + ASKED_MAX
        candidates = ranked(await ask_head_reports(rpc, others, group=self.head.run_id, enough=enough, most=most))
        return candidates[0] if candidates else None

    async def _wait_for_majority(self, round_: Round, reason: str) -> None:
        """Ask the authority, which alone can regroup the members that are left, and wait a while."""
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
        self._join_requests.settle(exchange.merge.plan, head)
        self.counted = tuple(body.counted for body in exchange.merge.merged())
        results = [exchange.results[i] for i in sorted(exchange.results)]
        await self._listener.committed(head, results)

    async def _catch_up(self, round_state: RoundState, candidate: HeadCandidate) -> None:
        """Move to a head that others have committed: by this peer's own candidate, by a change of term, or by fetching.

        If that fails, the peer stays at its head, unless replay has moved the state part of the way."""
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
                    round_state.candidate = None  # its state is overwritten by what is fetched
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

    async def _wait_for_others(self) -> None:
        """Wait, for a bounded time, until every member of the last head has committed it or has left."""
        rpc, head, me = self._context.host.rpc, self.head, self._context.me
        missing = {member.peer for member in head.members if member != me}
        with trio.move_on_after(4 * self._context.timeouts.answer_s):
            while missing:  # a peer seen at the last head may leave, so it is not asked again
                gone: set[str] = set()
                head_reports = await ask_head_reports(rpc, missing, group=head.run_id, most=len(missing), gone=gone)
                missing -= gone.union(peer for peer, report in head_reports if report.head.hash == head.hash)
                if missing:
                    await trio.sleep(WAIT_FOR_OTHERS_EVERY_S)
