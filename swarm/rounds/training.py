"""This peer's work under a plan: one at a time, in the trainer."""

from __future__ import annotations

from collections.abc import Callable

import trio

from optim.strategies.interface import Coding
from peer.catalogue.rounds import DiscardedRound, PhaseEntered
from swarm.protocol.agreement import events
from swarm.protocol.head import Head
from swarm.protocol.plan import WorkPlan
from swarm.rounds.context import RoundContext
from swarm.rounds.trainers.contribution import Contributor, EncodedUpdate


class Training:
    """Trains under the latest plan and reports the outcome. The update lives until the round is settled."""

    def __init__(self, context: RoundContext, feed: Callable[[events.Event], None]) -> None:
        self._context, self._feed = context, feed
        self._contributor = Contributor(context)
        self._scope: trio.CancelScope | None = None
        self._idle = trio.Event()
        self._idle.set()
        self.plan: WorkPlan | None = None
        self.update: EncodedUpdate | None = None
        """This peer's update under `plan`, once it is encoded."""
        self.began_at = 0.0

    def begin(self, plan: WorkPlan, head: Head, coding: Coding, finish_early: bool, tasks: trio.Nursery) -> None:
        """Work under a plan; under the present one, only `finish_early`."""
        if self.plan is not None and self.plan.hash == plan.hash:
            if finish_early:
                self._context.trainer.finish_early()
            return
        if self.plan is not None:
            self.stop("a new plan replaced it")
        self.plan, self.began_at = plan, trio.current_time()
        self._scope, before = trio.CancelScope(), self._idle
        self._idle = trio.Event()
        tasks.start_soon(self._work, plan, head, coding, finish_early, self._scope, before, self._idle)

    def stop(self, reason: str) -> None:
        """Drop the plan and what was computed under it."""
        if self.plan is None:
            return
        if self._scope is not None:
            self._scope.cancel()
        if self.update is not None:
            self._contributor.restore_residual(self.update)
        self._context.events.emit(DiscardedRound(round=self.plan.round, reason=reason))
        self.plan = self.update = self._scope = None

    def settle(self, merged: bool) -> None:
        """End the round: it was committed, with this peer's update or without."""
        if self._scope is not None:
            self._scope.cancel()
        if self.update is not None and not merged:
            self._contributor.restore_residual(self.update)
        self.plan = self.update = self._scope = None

    async def _work(
        self,
        plan: WorkPlan,
        head: Head,
        coding: Coding,
        cut_short: bool,
        scope: trio.CancelScope,
        before: trio.Event,
        idle: trio.Event,
    ) -> None:
        context = self._context
        try:
            await before.wait()  # the trainer does one thing at a time
            with scope:
                round_info, assignment = context.schedule.round_info(head), plan.of(context.me)
                context.events.emit(
                    PhaseEntered(
                        round=plan.round,
                        phase="compute",
                        step=round_info.step,
                        steps=assignment.steps if assignment is not None else 0,
                    )
                )
                signed, update = await self._contributor.contribute(plan, round_info, coding, cut_short)
                if scope.cancel_called:  # while it was encoded, which cannot be interrupted
                    if update is not None:
                        self._contributor.restore_residual(update)
                    return
                self.update = update
                if context.schedule.synchronous:
                    context.timeouts.note_batch(trio.current_time() - self.began_at)
                context.events.emit(PhaseEntered(round=plan.round, phase="submit"))
                self._feed(events.Submitted(signed, context.trainer.speed))
        finally:
            idle.set()
