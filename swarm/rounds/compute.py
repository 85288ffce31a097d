"""The compute half of a round at one peer: a plan is taken, worked on, and handed in.

The work outlives a leader: its successor adopts the plan, so that a lost leader costs seconds, not a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from optim.strategies.interface import Coding, Turn
from peer.errors import BarnraiseError, ProtocolViolation, RoundDiscarded
from peer.identity import Signed, open_body
from swarm.protocol.messages import HAND_IN, HandIn
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan, check_plan
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.leader_timeout import ElectionTimeout
from swarm.rounds.round_state import RoundState

HAND_IN_RETRY_S: Final = 1.0


class ComputePhase:
    """Whoever calls has checked that the orders are the leader's. `spawn` runs a task that ends with the round."""

    def __init__(
        self,
        post: RoundContext,
        height: RoundState,
        turn: Turn,
        coding: Coding,
        contributor: Contributor,
        patience: ElectionTimeout,
        spawn: Callable[..., Any],
    ) -> None:
        self._post, self._height = post, height
        self._turn, self._coding = turn, coding
        self._contributor = contributor
        self._patience = patience
        self._spawn = spawn
        self._scope: trio.CancelScope | None = None

    def begin(self, plan: WorkPlan, signed: Signed, leader: str, wrap_up: bool) -> None:
        """Work under a plan that is newer than what there was; with `wrap_up` only hand in what there is, for the
        others have heard of it before and are done."""
        height = self._height
        check_plan(plan, height.head, self._post.pace)
        if height.plan is not None:
            self.discard("a new plan replaced it")
        height.plan, height.signed_plan, height.planned_at = plan, signed, trio.current_time()
        height.left_out = plan.of(self._post.me) is None
        self._patience.give_work(leader, plan.hash, self._patience.time_for(plan) + 4 * self._post.tempo.answer_s)
        self._post.events.emit("round_planned", round=self._turn.round, members=len(plan.assignments))
        if not height.left_out:
            self._scope = trio.CancelScope()
            self._spawn(self._compute, plan, self._scope, wrap_up)

    def go_on(self, plan: WorkPlan, leader: str, wrap_up: bool) -> None:
        """A leader has adopted the plan that is worked on, or asks for what there is of it."""
        seconds = 4 * self._post.tempo.answer_s
        if self._post.pace.pipeline and self._height.contribution is None:
            seconds += self._patience.time_for(plan)
        self._patience.give_work(leader, plan.hash, seconds)
        if wrap_up:
            self._post.trainer.wrap_up()

    def discard(self, reason: str) -> None:
        """As `Round.discard`."""
        if self._scope is not None:
            self._scope.cancel()
        if self._height.message is not None:
            self._contributor.give_back(self._height.message)
        self._height.drop_work()
        self._post.events.emit("round_discarded", round=self._turn.round, reason=reason)

    def take_hand_in(self, signed: Signed) -> None:
        """A contribution, at the leader; checked when the roster is made."""
        height, plan = self._height, self._height.plan
        body = open_body(signed, CONTRIBUTION_KIND, Contribution)
        if body.head != height.head.hash:
            raise RoundDiscarded("the contribution is to another round, or another group's")
        if plan is None:  # an earlier leader's, which did not come here: whoever works on it has promised us first
            raise RoundDiscarded("a contribution came before its plan")
        if body.plan != plan.hash:
            raise RoundDiscarded("that plan was replaced")
        if plan.of(body.member) is None or body.member.peer != signed.signer:
            raise ProtocolViolation("a contribution came from a peer that was not assigned any work")
        height.handed_in[body.member] = signed
        height.changed.notify()

    async def _compute(self, plan: WorkPlan, scope: trio.CancelScope, hurried: bool) -> None:
        height, phase = self._height, self._phase
        with scope:
            phase("compute")
            contribution, message = await self._contributor.contribute(plan, self._turn, self._coding, hurried)
            if scope.cancel_called:  # while it was encoded, which nothing interrupts: the height is another plan's
                if message is not None:
                    self._contributor.give_back(message)
                return
            if self._post.pace.synchronous:
                self._post.tempo.note_batch(trio.current_time() - height.planned_at)
            end = self._patience.time_after_work(plan) + 4 * self._post.tempo.answer_s
            height.stage_deadline = min(height.stage_deadline, height.planned_at + end)
            height.contribution, height.message = contribution, message
            height.changed.notify()
            phase("hand in")
            await self._hand_in()

    def _phase(self, name: str) -> None:
        self._post.events.emit("phase_entered", round=self._turn.round, phase=name)

    async def _hand_in(self) -> None:
        """Give the contribution to the leader of the attempt promised last; a later leader asks for it by itself."""
        height = self._height
        assert height.contribution is not None
        while height.current is None:
            leader = height.head.leader(max(height.acceptor.promised, 0)).peer
            try:
                if leader == self._post.me.peer:
                    self.take_hand_in(height.contribution)
                else:
                    await self._post.host.rpc.call(
                        leader, HAND_IN, HandIn(height.contribution), timeout_s=self._post.tempo.answer_s
                    )
                return
            except BarnraiseError:
                promised = height.acceptor.promised
                await height.changed.until(lambda p=promised: height.acceptor.promised > p, HAND_IN_RETRY_S)  # type: ignore[misc]
