"""One round at one peer: plan -> compute -> exchange -> combine -> vote -> commit.

A leader drives it (`swarm.rounds.leader`); this file is what every peer of the group, the leader included, answers to
it, the compute half being `swarm.rounds.compute`. Weights change only when a majority of the last head's members voted
for the same next head, which names the state hash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from swarm.rounds.build_lock import Building
from swarm.rounds.compute import ComputePhase
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.exchange import Exchange, Merge
from swarm.rounds.leader_timeout import ElectionTimeout
from swarm.rounds.roster import merge_of
from swarm.rounds.round_state import RoundState
from swarm.rounds.voting import Voting

LINGER_S: Final = 20.0  # after a commit, slower peers may still be served the slices that they lack
ATTEMPTS_AHEAD_MAX: Final = 1 << 20  # nobody skips more: numbers must not run out


@dataclass(frozen=True)
class Nurseries:
    """`tasks` ends with the round, `lingering` outlives it."""

    tasks: trio.Nursery
    lingering: trio.Nursery


class Round:
    """The round after one head. The engine routes calls here; `height.decided` is set when it has committed.
    `overtaken` is called when a peer seems to be further on."""

    def __init__(
        self,
        post: RoundContext,
        height: RoundState,
        coding: Coding,
        contributor: Contributor,
        nurseries: Nurseries,
        overtaken: Callable[[], object],
    ) -> None:
        self.post = post
        self.height = height
        self.turn = post.pace.turn(height.head)
        self.coding = coding
        self.voting = Voting(post, height, nurseries.lingering, overtaken)
        self._contributor = contributor
        self.patience = ElectionTimeout(post, height)
        self._nurseries = nurseries
        self._stint = ComputePhase(post, height, self.turn, coding, contributor, self.patience, self.spawn)
        self._building: Building | None = None
        self._closed = False

    @property
    def number(self) -> int:
        return self.turn.round

    def phase(self, name: str) -> None:
        self.post.events.emit("phase_entered", round=self.number, phase=name)

    @property
    def over(self) -> bool:
        """Whether it takes no more orders: calls are answered by tasks that know nothing of the round's end."""
        return self._closed or self.height.decided is not None

    def spawn(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Run a task that ends with the round; `RoundDiscarded` if that is over."""
        if self.over:
            raise RoundDiscarded("that round is over")
        self._nurseries.tasks.start_soon(task, *arguments)

    # -- phase 1: promise, plan, compute -------------------------------------------------------------------------------

    async def promise_when_due(self, ask: Prepare, leader: str) -> Promise:
        """Answer the leader of an attempt; to one that interrupts another who still makes progress, as late as it can
        wait for it, and then with a refusal. So nobody stops a round by always calling for the next attempt."""
        with trio.move_on_after(0.8 * self.post.tempo.answer_s):
            while not self.over and not self.patience.is_due(ask.attempt):
                await self.height.changed.wait(0.25)
        return self.promise(ask, leader)

    def promise(self, ask: Prepare, leader: str) -> Promise:
        """Answer the leader of an attempt."""
        height = self.height
        self._check_order(leader, ask.attempt)
        if ask.attempt > max(height.acceptor.promised, 0) + ATTEMPTS_AHEAD_MAX:
            raise ProtocolViolation("a leader skipped an absurd number of attempts")
        due = leader == self.post.me.peer or self.patience.is_due(ask.attempt)
        granted = due and height.acceptor.promise(ask.attempt)
        merge = height.merge_of_vote()
        if granted:
            self.patience.give(leader, "promises", 2 * self.post.tempo.answer_s)
        return Promise(
            granted=granted,
            promised=height.acceptor.promised,
            head=height.head,
            member=self.post.me,
            speed=self.post.trainer.speed,
            plan=height.signed_plan,
            contribution=height.contribution,
            accepted=height.acceptor.accepted,
            accepted_roster=merge.roster if merge else None,
            accepted_plan=merge.signed_plan if merge else None,
            missing=height.current.missing() if height.current else (),
            silent=height.current.silent() if height.current else (),
            bandwidths=self._bandwidths(),
        )

    def _bandwidths(self) -> dict[str, float]:
        """Bytes/s that this peer measured to each member."""
        measured = {m.peer: self.post.host.measured_bandwidth(m.peer) for m in self.height.head.members}
        return {peer: speed for peer, speed in measured.items() if speed}

    def take_work(self, signed: Signed, wrap_up: bool, leader: str) -> None:
        """Begin to compute under a plan, or hand in what is ready (`wrap_up`). `leader` leads the attempt promised
        last; the plan may be one that an earlier leader has signed."""
        height = self.height
        plan = open_body(signed, PLAN_KIND, WorkPlan)
        if plan.head != height.head.hash:
            raise RoundDiscarded("the plan is for another round, or another group's")
        promised = max(height.acceptor.promised, 0)
        if height.head.leader(promised).peer != leader and self._may_have_led(leader, promised):
            raise RoundDiscarded("a later attempt was promised")  # which an earlier leader need not know
        self._check_order(leader, promised)
        if height.plan == plan:
            self._stint.go_on(plan, leader, wrap_up)
        if height.plan == plan or (height.plan is not None and plan.attempt <= height.plan.attempt):
            return
        self._check_order(signed.signer, plan.attempt)
        if plan.attempt > height.acceptor.promised:
            raise ProtocolViolation("a plan is for an attempt that was not announced")
        self._stint.begin(plan, signed, leader, wrap_up)

    def discard(self, reason: str) -> None:
        """Drop the round's work: outer weights stay, its samples stay unassigned, a new plan must come."""
        self._stint.discard(reason)

    def take_hand_in(self, signed: Signed) -> None:
        """The leader's side of a hand-in."""
        self._stint.take_hand_in(signed)

    # -- phase 2: exchange, vote, commit ----------------------------------------------------------------------------

    async def begin_exchange(self, roster: Roster, leader: str) -> None:
        """Exchange slices as the roster says, and vote for the head that the result leads to."""
        height = self.height
        self._check_order(leader, roster.attempt)
        if roster.hash in height.exchanges:
            return
        if height.plan is None or height.signed_plan is None or height.plan.hash != roster.plan:
            raise RoundDiscarded("the roster is for a plan this peer does not have")
        self._check_promised(roster.attempt)
        if any(exchange.merge.roster.attempt == roster.attempt for exchange in height.exchanges.values()):
            raise ProtocolViolation("a leader gave two rosters in one attempt")
        merge = merge_of(self.post, height.head, self.coding, roster, height.plan, height.signed_plan)
        seconds = self.post.tempo.exchange_s(self.payload_bytes()) + 2 * self.post.tempo.answer_s
        self.patience.give(leader, roster.attempt, seconds)
        if all(body.member != self.post.me for body in merge.contributors):
            height.left_out = True
            return
        building = await self._build_alone(roster.attempt)
        exchange = self._exchange_of(merge)
        height.remember(exchange)
        height.current = exchange
        height.changed.notify()
        self.phase("exchange")
        self._nurseries.lingering.start_soon(self._run_exchange, exchange, building)
        self.spawn(self._vote_when_built, exchange, roster.attempt)

    async def begin_finish(self, finish: Finish, leader: str) -> None:
        """A later leader found that an earlier attempt may have been decided: complete that one."""
        height = self.height
        self._check_order(leader, finish.attempt)
        self._check_promised(finish.attempt)
        seconds = self.post.tempo.exchange_s(self.payload_bytes()) + 2 * self.post.tempo.answer_s
        self.patience.give(leader, finish.attempt, seconds)
        if height.sealed == finish.accepted.head:
            self.spawn(self.voting.cast, finish.attempt, finish.accepted.head, finish.roster.hash)
        else:
            building = await self._build_alone(finish.attempt)
            self.spawn(self._finish, finish, building)

    async def _finish(self, finish: Finish, building: Building) -> None:
        try:
            with building.ends():
                exchange = await self._complete(finish)
            if building.stopped:
                return
            if self._seal(exchange) != finish.accepted.head:
                raise ProtocolViolation("the result leads to another head than was voted for")
        except (NetworkError, ProtocolViolation, RoundDiscarded) as error:
            self.post.events.emit("finish_failed", round=self.number, reason=str(error))
            return
        await self.voting.cast(finish.attempt, finish.accepted.head, finish.roster.hash)

    async def _complete(self, finish: Finish) -> Exchange:
        """The exchange of an earlier attempt, with the next state built from its results."""
        height = self.height
        known = height.exchanges.get(finish.roster.hash)
        if known is not None and known.built.is_set():
            await known.rebuild()
            return known
        plan = open_body(finish.plan, PLAN_KIND, WorkPlan)
        exchange = self._exchange_of(merge_of(self.post, height.head, self.coding, finish.roster, plan, finish.plan))
        await exchange.fetch_from(finish.holder)
        height.remember(exchange)
        return exchange

    def _exchange_of(self, merge: Merge) -> Exchange:
        post = self.post
        timeout_s = post.tempo.exchange_s(self.payload_bytes())
        height = self.height
        mine = height.message.slices if height.message else ()
        return Exchange(post.me.peer, merge, post.state, mine, height.slices, post.host.rpc, timeout_s, post.events)

    async def _vote_when_built(self, exchange: Exchange, attempt: int) -> None:
        began = trio.current_time()
        await exchange.built.wait()
        if self.height.current is not exchange:
            return
        self.post.tempo.note_exchange(trio.current_time() - began)
        head = self._seal(exchange)
        self.phase("vote")
        faults.reach("before_vote", self.number)
        await self.voting.cast(attempt, head, exchange.key)

    def _seal(self, exchange: Exchange) -> Head:
        """The head that the next state, which that exchange has just built, stands for."""
        height, merge = self.height, exchange.merge
        height.sealed_by = exchange
        height.sealed = next_head(
            height.head, merge.plan, merge.merged(), merge.contributors, self.post.pace, exchange.state_hash
        )
        self.voting.count()
        return height.sealed

    # -- slices ------------------------------------------------------------------------------------------------------

    async def take_contribution(self, call: Call[SliceOf]) -> Done:
        """A contributor's slice; waits for the roster if the slice was faster."""
        exchange = await self._exchange_named(call.body.key, call.peer)
        exchange.take_contribution(call.body.index, call.peer, call.payload)
        return Done()

    async def take_result(self, call: Call[SliceOf]) -> Done:
        """A merged slice from its owner."""
        (await self._exchange_named(call.body.key, call.peer)).take_result(call.body.index, call.peer, call.payload)
        return Done()

    async def _exchange_named(self, key: bytes, sender: str) -> Exchange:
        plan = self.height.plan
        if plan is None or all(a.member.peer != sender for a in plan.assignments):
            raise RoundDiscarded("the sender of a slice has no part in this round")  # no memory is held for strangers
        await self.height.changed.until(lambda: key in self.height.exchanges, self.post.tempo.answer_s)
        exchange = self.height.exchanges.get(key)
        if exchange is None:
            raise RoundDiscarded("that attempt is over or not begun here")
        return exchange

    # -- small things ------------------------------------------------------------------------------------------------

    def payload_bytes(self) -> int:
        """About what one exchange makes this peer send: its message, and as much again as an owner."""
        members = max(1, len(self.height.head.members))
        slices = range(self.coding.count)
        return sum(self.coding.message_bytes(i) + self.coding.result_bytes(i, members) for i in slices)

    def end(self, head: Head) -> None:
        """After the commit: let a running exchange serve slower peers for a while."""
        merge = self.height.sealed_by.merge if self.height.sealed_by is not None else None
        if merge is not None and head == self.height.sealed and not merge.merged():
            self.post.events.emit("round_empty", round=self.number, members=len(head.members))
        merged = merge is not None and head == self.height.sealed and self.post.me in {c.member for c in merge.merged()}
        if self.height.message is not None and not merged:
            self._contributor.give_back(self.height.message)
        if self._building is not None:
            self._building.scope.deadline = trio.current_time() + LINGER_S

    def close(self) -> None:
        """Take no more orders."""
        self._closed = True

    async def abandon(self) -> None:
        """The round is overtaken: stop everything that touches the outer state."""
        self.close()
        while self._building is not None and not self._building.over.is_set():
            await self._building.stop()

    async def _run_exchange(self, exchange: Exchange, building: Building) -> None:
        with building.ends(), self.post.shelf.stepping_back():  # joiners get less of the link meanwhile
            await exchange.run()

    async def _build_alone(self, attempt: int) -> Building:
        """Begin to build the next state for `attempt`, when whatever else was building it has stopped."""
        while self._building is not None and not self._building.over.is_set():
            await self._building.stop()
        height = self.height
        if self.over or height.acceptor.promised > attempt:
            raise RoundDiscarded("that attempt is over")
        height.current = height.sealed = height.sealed_by = None
        self._building = Building()
        return self._building

    def _check_promised(self, attempt: int) -> None:
        """Orders of phase 2 are taken in the attempt promised last, and in no other."""
        promised = self.height.acceptor.promised
        if attempt < promised:
            raise RoundDiscarded("a later attempt was promised")
        if attempt > promised:
            raise ProtocolViolation("a leader gave orders in an attempt that was not announced")

    def _may_have_led(self, peer: str, promised: int) -> bool:
        """Whether that peer led an attempt before the one `promised`, with its own plan or one that it found."""
        head, mine = self.height.head, self.height.signed_plan
        turns = range(max(0, promised - TRIES_PER_LEADER * len(head.members)), promised)
        return (mine is not None and mine.signer == peer) or any(head.leader(turn).peer == peer for turn in turns)

    def _check_order(self, sender: str, attempt: int) -> None:
        if self.over:
            raise RoundDiscarded("that round is over")
        if attempt < 0 or not self.height.head.members or self.height.head.leader(attempt).peer != sender:
            raise ProtocolViolation("a peer gave orders in an attempt that another leads")
