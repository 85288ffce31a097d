"""The compute phase of a round: accept a plan, train, submit the contribution.

If the leader fails, its successor adopts the same plan, so no training is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from optim.strategies.interface import Coding, RoundInfo
from peer.errors import BarnraiseError, ProtocolViolation, RoundDiscarded
from peer.identity import Signed, open_body
from swarm.protocol.messages import SUBMIT, Submit
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan, check_plan
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.election_timeout import ElectionTimeout
from swarm.rounds.round_state import RoundState

SUBMIT_RETRY_S: Final = 1.0


class ComputePhase:
    """Computes under the latest plan, and submits what comes of it.

    The caller has checked that orders come from the leader. `spawn` starts a task that ends with the round."""

    def __init__(
        self,
        context: RoundContext,
        round_state: RoundState,
        round_info: RoundInfo,
        coding: Coding,
        contributor: Contributor,
        election_timeout: ElectionTimeout,
        spawn: Callable[..., Any],
    ) -> None:
        self._context, self._round_state = context, round_state
        self._round_info, self._coding = round_info, coding
        self._contributor = contributor
        self._election_timeout = election_timeout
        self._spawn = spawn
        self._scope: trio.CancelScope | None = None

    def begin(self, plan: WorkPlan, signed: Signed, leader: str, finish_early: bool) -> None:
        """Start to compute under a newer plan. With `finish_early`, only submit what the trainer already has, since the
        other members have finished."""
        round_state = self._round_state
        check_plan(plan, round_state.head, self._context.schedule)
        if round_state.plan is not None:
            self.discard("a new plan replaced it")
        round_state.plan, round_state.signed_plan, round_state.planned_at = plan, signed, trio.current_time()
        round_state.left_out = plan.of(self._context.me) is None
        self._election_timeout.allow_work(
            leader, plan.hash, self._election_timeout.time_for(plan) + 4 * self._context.timeouts.answer_s
        )
        self._context.events.emit("round_planned", round=self._round_info.round, members=len(plan.assignments))
        if not round_state.left_out:
            self._scope = trio.CancelScope()
            self._spawn(self._compute, plan, self._scope, finish_early)

    def go_on(self, plan: WorkPlan, leader: str, finish_early: bool) -> None:
        """Continue under the present plan, which a leader has adopted; `finish_early` asks for what there is of it."""
        seconds = 4 * self._context.timeouts.answer_s
        if self._context.schedule.pipeline and self._round_state.contribution is None:
            seconds += self._election_timeout.time_for(plan)
        self._election_timeout.allow_work(leader, plan.hash, seconds)
        if finish_early:
            self._context.trainer.finish_early()

    def discard(self, reason: str) -> None:
        """Drop the plan and everything computed under it (see `Round.discard`)."""
        if self._scope is not None:
            self._scope.cancel()
        if self._round_state.update is not None:
            self._contributor.restore_residual(self._round_state.update)
        self._round_state.drop_work()
        self._context.events.emit("round_discarded", round=self._round_info.round, reason=reason)

    def take_submission(self, signed: Signed) -> None:
        """Accept a contribution, as the leader. It is checked in full before the roster is made."""
        round_state, plan = self._round_state, self._round_state.plan
        body = open_body(signed, CONTRIBUTION_KIND, Contribution)
        if body.head != round_state.head.hash:
            raise RoundDiscarded("the contribution is for another round or another group")
        if plan is None:  # it is an earlier leader's plan: its members send it with their promise
            raise RoundDiscarded("a contribution came before its plan")
        if body.plan != plan.hash:
            raise RoundDiscarded("that plan was replaced")
        if plan.of(body.member) is None or body.member.peer != signed.signer:
            raise ProtocolViolation("a contribution came from a peer that was not assigned any work")
        round_state.submitted[body.member] = signed
        round_state.changed.notify()

    async def _compute(self, plan: WorkPlan, scope: trio.CancelScope, cut_short: bool) -> None:
        round_state, phase = self._round_state, self._phase
        with scope:
            phase("compute")
            contribution, update = await self._contributor.contribute(plan, self._round_info, self._coding, cut_short)
            if scope.cancel_called:  # while encoding, which cannot be interrupted: a newer plan has begun
                if update is not None:
                    self._contributor.restore_residual(update)
                return
            if self._context.schedule.synchronous:
                self._context.timeouts.note_batch(trio.current_time() - round_state.planned_at)
            end = self._election_timeout.time_after_work(plan) + 4 * self._context.timeouts.answer_s
            round_state.step_deadline = min(round_state.step_deadline, round_state.planned_at + end)
            round_state.contribution, round_state.update = contribution, update
            round_state.changed.notify()
            phase("submit")
            await self._submit()

    def _phase(self, name: str) -> None:
        self._context.events.emit("phase_entered", round=self._round_info.round, phase=name)

    async def _submit(self) -> None:
        """Send the contribution to the leader of the attempt promised last, until it is accepted.
        A later leader gets it with this peer's promise."""
        round_state = self._round_state
        assert round_state.contribution is not None
        while round_state.current is None:
            leader = round_state.head.leader(max(round_state.acceptor.promised, 0)).peer
            try:
                if leader == self._context.me.peer:
                    self.take_submission(round_state.contribution)
                else:
                    await self._context.host.rpc.call(
                        leader, SUBMIT, Submit(round_state.contribution), timeout_s=self._context.timeouts.answer_s
                    )
                return
            except BarnraiseError:
                promised = round_state.acceptor.promised
                await round_state.changed.until(lambda p=promised: round_state.acceptor.promised > p, SUBMIT_RETRY_S)  # type: ignore[misc]
