"""One round at one peer: plan -> compute -> exchange -> merge -> vote -> commit.

A leader drives the round (`swarm.rounds.leader`). This file is how every peer, the leader included, answers its orders;
the compute phase is in `swarm.rounds.compute`. Weights change only if a majority of the last head's members has voted
for the same next head, which names the hash of the new state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from optim.strategies.interface import Coding
from peer import faults
from peer.errors import NetworkError, ProtocolViolation, RoundDiscarded
from peer.identity import Signed, open_body
from peer.net.rpc import Call
from swarm.protocol.head import TRIES_PER_LEADER, Head
from swarm.protocol.messages import Done, Finish, Prepare, Promise, SliceOf
from swarm.protocol.plan import PLAN_KIND, Roster, WorkPlan, next_head
from swarm.rounds.compute import ComputePhase
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.election_timeout import ElectionTimeout
from swarm.rounds.exchange import BuildLock, ButterflyAllReduce, MergePlan
from swarm.rounds.roster import check_roster
from swarm.rounds.round_state import RoundState
from swarm.rounds.voting import Voting

LINGER_S: Final = 20.0  # after a commit, to serve slower peers the slices that they lack
ATTEMPTS_AHEAD_MAX: Final = 1 << 20  # attempts that a leader may skip, so that numbers do not run out


class Round:
    """The round after one head, until `round_state.decided` is set. The engine's handlers route calls to it.

    Tasks in `tasks` end with the round; those in `lingering` outlive it. `overtaken` is called when a peer seems to
    have a later head."""

    def __init__(
        self,
        context: RoundContext,
        round_state: RoundState,
        coding: Coding,
        contributor: Contributor,
        tasks: trio.Nursery,
        lingering: trio.Nursery,
        overtaken: Callable[[], object],
    ) -> None:
        self.context = context
        self.round_state = round_state
        self.round_info = context.schedule.round_info(round_state.head)
        self.coding = coding
        self.voting = Voting(context, round_state, lingering, overtaken)
        self._contributor = contributor
        self.election_timeout = ElectionTimeout(context, round_state)
        self._tasks, self._lingering = tasks, lingering
        self._compute_phase = ComputePhase(
            context, round_state, self.round_info, coding, contributor, self.election_timeout, self.spawn
        )
        self._build_lock: BuildLock | None = None
        self._closed = False

    @property
    def number(self) -> int:
        return self.round_info.round

    def phase(self, name: str) -> None:
        """Tell that this peer has entered that phase."""
        self.context.events.emit("phase_entered", round=self.number, phase=name)

    @property
    def over(self) -> bool:
        """Whether the round takes no more orders. Handlers may still call it after its end."""
        return self._closed or self.round_state.decided is not None

    def spawn(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Start a task that ends with the round. Raise `RoundDiscarded` if the round is over."""
        if self.over:
            raise RoundDiscarded("that round is over")
        self._tasks.start_soon(task, *arguments)

    # -- phase 1: promise, plan, compute -------------------------------------------------------------------------------

    async def promise_when_due(self, ask: Prepare, leader: str) -> Promise:
        """Answer the leader of an attempt, but not before the current leader's time is over.

        A leader that interrupts one still making progress gets a refusal, as late as it can wait for it. So a peer that
        keeps calling for the next attempt cannot stop the round."""
        with trio.move_on_after(0.8 * self.context.timeouts.answer_s):
            while not self.over and not self.election_timeout.is_due(ask.attempt):
                await self.round_state.changed.wait(0.25)
        return self.promise(ask, leader)

    def promise(self, ask: Prepare, leader: str) -> Promise:
        """Answer the leader of an attempt at once."""
        round_state = self.round_state
        self._check_order(leader, ask.attempt)
        if ask.attempt > max(round_state.acceptor.promised, 0) + ATTEMPTS_AHEAD_MAX:
            raise ProtocolViolation("a leader skipped an absurd number of attempts")
        due = leader == self.context.me.peer or self.election_timeout.is_due(ask.attempt)
        granted = due and round_state.acceptor.promise(ask.attempt)
        merge = round_state.merge_of_vote()
        if granted:
            self.election_timeout.allow(leader, "promises", 2 * self.context.timeouts.answer_s)
        return Promise(
            granted=granted,
            promised=round_state.acceptor.promised,
            head=round_state.head,
            member=self.context.me,
            speed=self.context.trainer.speed,
            plan=round_state.signed_plan,
            contribution=round_state.contribution,
            accepted=round_state.acceptor.accepted,
            accepted_roster=merge.roster if merge else None,
            accepted_plan=merge.signed_plan if merge else None,
            missing=round_state.current.missing() if round_state.current else (),
            silent=round_state.current.silent() if round_state.current else (),
            bandwidths=self._bandwidths(),
        )

    def _bandwidths(self) -> dict[str, float]:
        """Return the bytes/s that this peer measured to each member."""
        measured = {m.peer: self.context.host.measured_bandwidth(m.peer) for m in self.round_state.head.members}
        return {peer: speed for peer, speed in measured.items() if speed}

    def take_work(self, signed: Signed, finish_early: bool, leader: str) -> None:
        """Compute under a plan, or (`finish_early`) submit what is ready. `leader` leads the attempt promised last; the
        plan may be signed by an earlier leader."""
        round_state = self.round_state
        plan = open_body(signed, PLAN_KIND, WorkPlan)
        if plan.head != round_state.head.hash:
            raise RoundDiscarded("the plan is for another round or another group")
        promised = max(round_state.acceptor.promised, 0)
        if round_state.head.leader(promised).peer != leader and self._may_have_led(leader, promised):
            raise RoundDiscarded("a later attempt was promised")  # an earlier leader may not know of it
        self._check_order(leader, promised)
        if round_state.plan == plan:
            self._compute_phase.go_on(plan, leader, finish_early)
        if round_state.plan == plan or (round_state.plan is not None and plan.attempt <= round_state.plan.attempt):
            return
        self._check_order(signed.signer, plan.attempt)
        if plan.attempt > round_state.acceptor.promised:
            raise ProtocolViolation("a plan is for an attempt that was not announced")
        self._compute_phase.begin(plan, signed, leader, finish_early)

    def discard(self, reason: str) -> None:
        """Drop the plan and what was computed under it. The outer weights stay; its samples stay free."""
        self._compute_phase.discard(reason)

    def take_submission(self, signed: Signed) -> None:
        """Accept a contribution, as the leader."""
        self._compute_phase.take_submission(signed)

    # -- phase 2: exchange, vote, commit ----------------------------------------------------------------------------

    async def begin_exchange(self, roster: Roster, leader: str) -> None:
        """Start to exchange slices under a roster, and to vote for the head that the result leads to."""
        round_state = self.round_state
        self._check_order(leader, roster.attempt)
        if roster.hash in round_state.exchanges:
            return
        if round_state.plan is None or round_state.signed_plan is None or round_state.plan.hash != roster.plan:
            raise RoundDiscarded("the roster is for a plan this peer does not have")
        self._check_promised(roster.attempt)
        if any(exchange.merge.roster.attempt == roster.attempt for exchange in round_state.exchanges.values()):
            raise ProtocolViolation("a leader gave two rosters in one attempt")
        merge = check_roster(
            self.context, round_state.head, self.coding, roster, round_state.plan, round_state.signed_plan
        )
        seconds = self.context.timeouts.exchange_s(self.payload_bytes()) + 2 * self.context.timeouts.answer_s
        self.election_timeout.allow(leader, roster.attempt, seconds)
        if all(body.member != self.context.me for body in merge.contributors):
            round_state.left_out = True
            return
        build_lock = await self._lock_buffers(roster.attempt)
        exchange = self._exchange_of(merge)
        round_state.remember(exchange)
        round_state.current = exchange
        round_state.changed.notify()
        self.phase("exchange")
        self._lingering.start_soon(self._run_exchange, exchange, build_lock)
        self.spawn(self._vote_when_built, exchange, roster.attempt)

    async def begin_finish(self, finish: Finish, leader: str) -> None:
        """Start to finish an earlier attempt, because it may have been decided."""
        round_state = self.round_state
        self._check_order(leader, finish.attempt)
        self._check_promised(finish.attempt)
        seconds = self.context.timeouts.exchange_s(self.payload_bytes()) + 2 * self.context.timeouts.answer_s
        self.election_timeout.allow(leader, finish.attempt, seconds)
        if round_state.candidate == finish.accepted.head:
            self.spawn(self.voting.cast, finish.attempt, finish.accepted.head, finish.roster.hash)
        else:
            build_lock = await self._lock_buffers(finish.attempt)
            self.spawn(self._finish, finish, build_lock)

    async def _finish(self, finish: Finish, build_lock: BuildLock) -> None:
        try:
            with build_lock.hold():
                exchange = await self._complete(finish)
            if build_lock.cancelled:
                return
            if self._set_candidate(exchange) != finish.accepted.head:
                raise ProtocolViolation("the result leads to another head than the one voted for")
        except (NetworkError, ProtocolViolation, RoundDiscarded) as error:
            self.context.events.emit("finish_failed", round=self.number, reason=str(error))
            return
        await self.voting.cast(finish.attempt, finish.accepted.head, finish.roster.hash)

    async def _complete(self, finish: Finish) -> ButterflyAllReduce:
        """Return the exchange of an earlier attempt, with the next state built from its results."""
        round_state = self.round_state
        known = round_state.exchanges.get(finish.roster.hash)
        if known is not None and known.built.is_set():
            await known.rebuild()
            return known
        plan = open_body(finish.plan, PLAN_KIND, WorkPlan)
        exchange = self._exchange_of(
            check_roster(self.context, round_state.head, self.coding, finish.roster, plan, finish.plan)
        )
        await exchange.fetch_from(finish.holder)
        round_state.remember(exchange)
        return exchange

    def _exchange_of(self, merge: MergePlan) -> ButterflyAllReduce:
        round_state = self.round_state
        timeout_s = self.context.timeouts.exchange_s(self.payload_bytes())
        mine = round_state.update.slices if round_state.update else ()
        return ButterflyAllReduce(self.context, merge, mine, round_state.received, round_state.delivered, timeout_s)

    async def _vote_when_built(self, exchange: ButterflyAllReduce, attempt: int) -> None:
        began = trio.current_time()
        await exchange.built.wait()
        if self.round_state.current is not exchange:
            return
        self.context.timeouts.note_exchange(trio.current_time() - began)
        head = self._set_candidate(exchange)
        self.phase("vote")
        faults.reach("before_vote", self.number)
        await self.voting.cast(attempt, head, exchange.key)

    def _set_candidate(self, exchange: ButterflyAllReduce) -> Head:
        """Derive the candidate head from the next state that an exchange has just built."""
        round_state, merge = self.round_state, exchange.merge
        round_state.built_by = exchange
        round_state.candidate = next_head(
            round_state.head, merge.plan, merge.merged(), merge.contributors, self.context.schedule, exchange.state_hash
        )
        self.voting.count()
        return round_state.candidate

    # -- slices ------------------------------------------------------------------------------------------------------

    async def expect_contribution(self, peer: str, asked: SliceOf, size_bytes: int) -> None:
        """Raise unless a slice is wanted, before it is read; wait for the roster if the slice was faster."""
        (await self._exchange_named(asked.key, peer)).expect_contribution(asked.index, peer, size_bytes)

    async def expect_result(self, peer: str, asked: SliceOf, size_bytes: int) -> None:
        """Raise unless a merged slice is wanted, before it is read."""
        (await self._exchange_named(asked.key, peer)).expect_result(asked.index, peer, size_bytes)

    async def take_contribution(self, call: Call[SliceOf]) -> Done:
        """Accept a contributor's slice."""
        exchange = await self._exchange_named(call.body.key, call.peer)
        exchange.take_contribution(call.body.index, call.peer, call.payload)
        return Done()

    async def take_result(self, call: Call[SliceOf]) -> Done:
        """Accept a merged slice from its owner."""
        (await self._exchange_named(call.body.key, call.peer)).take_result(call.body.index, call.peer, call.payload)
        return Done()

    async def _exchange_named(self, key: bytes, sender: str) -> ButterflyAllReduce:
        plan = self.round_state.plan
        if plan is None or all(a.member.peer != sender for a in plan.assignments):
            raise RoundDiscarded("the sender of a slice has no part in this round")  # hold no memory for other peers
        await self.round_state.changed.until(lambda: key in self.round_state.exchanges, self.context.timeouts.answer_s)
        exchange = self.round_state.exchanges.get(key)
        if exchange is None:
            raise RoundDiscarded("that attempt is over or has not begun here")
        return exchange

    # -- end and checks ----------------------------------------------------------------------------------------------

    def payload_bytes(self) -> int:
        """Estimate what this peer sends in one exchange: its update, and as much again as an owner."""
        members = max(1, len(self.round_state.head.members))
        slices = range(self.coding.count)
        return sum(self.coding.message_bytes(i) + self.coding.result_bytes(i, members) for i in slices)

    def end(self, head: Head) -> None:
        """End the round after the commit; let a running exchange serve slower peers for a while."""
        merge = self.round_state.built_by.merge if self.round_state.built_by is not None else None
        if merge is not None and head == self.round_state.candidate and not merge.merged():
            self.context.events.emit("round_empty", round=self.number, members=len(head.members))
        merged = (
            merge is not None
            and head == self.round_state.candidate
            and self.context.me in {c.member for c in merge.merged()}
        )
        if self.round_state.update is not None and not merged:
            self._contributor.restore_residual(self.round_state.update)
        if self._build_lock is not None:
            self._build_lock.scope.deadline = trio.current_time() + LINGER_S

    def close(self) -> None:
        """Accept no more orders."""
        self._closed = True

    async def abandon(self) -> None:
        """End a round that was overtaken; return when nothing touches the outer state any more."""
        self.close()
        while self._build_lock is not None and not self._build_lock.released.is_set():
            await self._build_lock.cancel()

    async def _run_exchange(self, exchange: ButterflyAllReduce, build_lock: BuildLock) -> None:
        with build_lock.hold(), self.context.snapshots.stepping_back():  # joiners get less of the link meanwhile
            await exchange.run()

    async def _lock_buffers(self, attempt: int) -> BuildLock:
        """Cancel the present builder of the next state; return the lock for `attempt`."""
        while self._build_lock is not None and not self._build_lock.released.is_set():
            await self._build_lock.cancel()
        round_state = self.round_state
        if self.over or round_state.acceptor.promised > attempt:
            raise RoundDiscarded("that attempt is over")
        round_state.current = round_state.candidate = round_state.built_by = None
        self._build_lock = BuildLock()
        return self._build_lock

    def _check_promised(self, attempt: int) -> None:
        """Raise unless `attempt` is the one promised last: only in it are orders of phase 2 accepted."""
        promised = self.round_state.acceptor.promised
        if attempt < promised:
            raise RoundDiscarded("a later attempt was promised")
        if attempt > promised:
            raise ProtocolViolation("a leader gave orders in an attempt that was not announced")

    def _may_have_led(self, peer: str, promised: int) -> bool:
        """Return whether that peer may have led an attempt before `promised`."""
        head, mine = self.round_state.head, self.round_state.signed_plan
        attempts = range(max(0, promised - TRIES_PER_LEADER * len(head.members)), promised)
        return (mine is not None and mine.signer == peer) or any(head.leader(n).peer == peer for n in attempts)

    def _check_order(self, sender: str, attempt: int) -> None:
        """Raise unless the round is open and `sender` leads `attempt`."""
        if self.over:
            raise RoundDiscarded("that round is over")
        if attempt < 0 or not self.round_state.head.members or self.round_state.head.leader(attempt).peer != sender:
            raise ProtocolViolation("a peer gave orders in an attempt that another peer leads")
