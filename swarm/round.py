"""One round at one peer: plan -> compute -> exchange -> combine -> vote -> commit.

A leader drives it (`swarm.leader`); this file is what every peer of the group, the leader included, answers to it. The
work (`WorkPlan`) outlives a leader: its successor adopts it, so that a lost leader costs seconds, not a round. Weights
change only when a majority of the last head's members voted for the same next head, which names the state hash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from optim.recipes.interface import Coding
from peer import faults
from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RoundDiscarded
from peer.identity import Signed, open_body
from peer.rpc import Call
from swarm.building import Building
from swarm.chain import Head
from swarm.contribute import Contributor
from swarm.exchange import Exchange, Merge
from swarm.height import Height
from swarm.messages import HAND_IN, Done, Finish, HandIn, Prepare, Promise, SliceOf
from swarm.patience import Patience
from swarm.plan import (
    CONTRIBUTION_KIND,
    PLAN_KIND,
    Contribution,
    Roster,
    WorkPlan,
    check_plan,
    next_head,
    open_roster,
)
from swarm.post import Post
from swarm.voting import Voting

LINGER_S: Final = 20.0  # after a commit, slower peers may still be served the slices that they lack
HAND_IN_RETRY_S: Final = 1.0
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
        post: Post,
        height: Height,
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
        self._patience = Patience(post, height)
        self._nurseries = nurseries
        self._work_scope: trio.CancelScope | None = None
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

    # -- phase 1: promise, plan, compute ----------------------------------------------------------------------------

    async def promise_when_due(self, ask: Prepare, leader: str) -> Promise:
        """Answer the leader of an attempt; to one that interrupts another who still makes progress, as late as it can
        wait for it, and then with a refusal. So nobody stops a round by always calling for the next attempt."""
        with trio.move_on_after(0.8 * self.post.tempo.answer_s):
            while not self.over and not self._patience.is_due(ask.attempt):
                await self.height.changed.wait(0.25)
        return self.promise(ask, leader)

    def promise(self, ask: Prepare, leader: str) -> Promise:
        """Answer the leader of an attempt."""
        height = self.height
        self._check_order(leader, ask.attempt)
        if ask.attempt > max(height.acceptor.promised, 0) + ATTEMPTS_AHEAD_MAX:
            raise ProtocolViolation("a leader skipped an absurd number of attempts")
        due = leader == self.post.me.peer or self._patience.is_due(ask.attempt)
        granted = due and height.acceptor.promise(ask.attempt)
        merge = height.merge_of_vote()
        if granted:
            self._patience.give(leader, "promises", 2 * self.post.tempo.answer_s)
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
        self._check_order(leader, max(height.acceptor.promised, 0))
        if height.plan == plan:
            self._patience.give(leader, plan.hash, 4 * self.post.tempo.answer_s)
            if wrap_up:
                self.post.trainer.wrap_up()
        if height.plan == plan or (height.plan is not None and plan.attempt <= height.plan.attempt):
            return
        self._check_order(signed.signer, plan.attempt)
        if plan.attempt > height.acceptor.promised:
            raise ProtocolViolation("a plan is for an attempt that was not announced")
        check_plan(plan, height.head, self.post.pace)
        if height.plan is not None:
            self.discard("a new plan replaced it")
        height.plan, height.signed_plan, height.planned_at = plan, signed, trio.current_time()
        height.left_out = plan.of(self.post.me) is None
        self._patience.give(leader, plan.hash, self._patience.time_for(plan) + 4 * self.post.tempo.answer_s)
        self.post.events.emit("round_planned", round=self.number, members=len(plan.assignments))
        if not height.left_out:
            self._work_scope = trio.CancelScope()
            self.spawn(self._compute, plan, self._work_scope)

    def discard(self, reason: str) -> None:
        """Drop the round's work: outer weights stay, its samples stay unassigned, a new plan must come."""
        if self._work_scope is not None:
            self._work_scope.cancel()
        if self.height.message is not None:
            self._contributor.give_back(self.height.message)
        self.height.drop_work()
        self.post.events.emit("round_discarded", round=self.number, reason=reason)

    async def _compute(self, plan: WorkPlan, scope: trio.CancelScope) -> None:
        height = self.height
        with scope:
            self.phase("compute")
            contribution, height.message = await self._contributor.contribute(plan, self.turn, self.coding)
            end = height.planned_at + self._patience.time_for(plan) + 4 * self.post.tempo.answer_s
            height.stage_deadline = min(height.stage_deadline, end)  # now the speed is known
            height.contribution = contribution
            height.changed.notify()
            self.phase("hand in")
            await self._hand_in()

    async def _hand_in(self) -> None:
        """Give the contribution to the leader of the attempt promised last; a later leader asks for it by itself."""
        height = self.height
        assert height.contribution is not None
        while height.current is None:
            leader = height.head.leader(max(height.acceptor.promised, 0)).peer
            try:
                if leader == self.post.me.peer:
                    self.take_hand_in(height.contribution)
                else:
                    await self.post.host.rpc.call(
                        leader, HAND_IN, HandIn(height.contribution), timeout_s=self.post.tempo.answer_s
                    )
                return
            except BarnraiseError:
                promised = height.acceptor.promised
                await height.changed.until(lambda p=promised: height.acceptor.promised > p, HAND_IN_RETRY_S)  # type: ignore[misc]

    def take_hand_in(self, signed: Signed) -> None:
        """The leader's side of a hand-in; checked when the roster is made."""
        plan = self.height.plan
        if plan is None:
            raise ProtocolViolation("a contribution came before its plan")
        body = open_body(signed, CONTRIBUTION_KIND, Contribution)
        if body.plan != plan.hash:
            raise RoundDiscarded("that plan was replaced")
        if plan.of(body.member) is None or body.member.peer != signed.signer:
            raise ProtocolViolation("a contribution came from a peer that was not assigned any work")
        self.height.handed_in[body.member] = signed
        self.height.changed.notify()

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
        merge = self.merge_of(roster, height.plan, height.signed_plan)
        seconds = self.post.tempo.exchange_s(self.payload_bytes()) + 2 * self.post.tempo.answer_s
        self._patience.give(leader, roster.attempt, seconds)
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

    def merge_of(self, roster: Roster, plan: WorkPlan, signed_plan: Signed) -> Merge:
        """Check a roster and derive what it merges. `RoundDiscarded` if the gate lets nobody's update pass."""
        bodies = open_roster(roster, self.height.head, plan, self.coding.count, self.post.pace)
        weights = self._weights(bodies)
        if not any(weights):
            raise RoundDiscarded("no contributor has a usable update")
        return Merge(self.turn, plan, signed_plan, roster, bodies, weights, self.coding)

    def _weights(self, bodies: Sequence[Contribution]) -> tuple[float, ...]:
        """Each contributor's share of the mean, from the work and the norms committed to: what every peer computes
        alike."""
        working = [body for body in bodies if body.steps > 0]
        tokens = [body.samples * self.post.pace.seq_len for body in working]
        weights = iter(self.post.state.recipe.weights(tokens, [body.norm for body in working]))
        return tuple(next(weights) if body.steps > 0 else 0.0 for body in bodies)

    async def begin_finish(self, finish: Finish, leader: str) -> None:
        """A later leader found that an earlier attempt may have been decided: complete that one."""
        height = self.height
        self._check_order(leader, finish.attempt)
        self._check_promised(finish.attempt)
        self._patience.give(leader, finish.attempt, self.post.tempo.exchange_s(0) + 2 * self.post.tempo.answer_s)
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
        exchange = self._exchange_of(self.merge_of(finish.roster, plan, finish.plan))
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
        (await self._exchange_named(call.body.key, call.peer)).take_contribution(
            call.body.index, call.peer, call.payload
        )
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

    def _check_order(self, sender: str, attempt: int) -> None:
        if self.over:
            raise RoundDiscarded("that round is over")
        if attempt < 0 or not self.height.head.members or self.height.head.leader(attempt).peer != sender:
            raise ProtocolViolation("a peer gave orders in an attempt that another leads")
