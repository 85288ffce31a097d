"""How long a member waits for its leader before it lets the next one take over."""

from __future__ import annotations

from typing import Final

import trio

from swarm.height import Height
from swarm.plan import ROUND_TIME_SLACK, WorkPlan
from swarm.post import Post

STAGES_PER_LEADER: Final = 5  # promises, and plan and exchange twice: then the next one takes over, it may be the fault
LAST_ONES_S: Final = 20.0  # those who are slow are asked for what they have, encode it and hand it in
UNHURRIED: Final = 4.0  # times what the peer itself would take for the whole round's steps, it waits for the others


class Patience:
    """A leader is given time for each stage of its attempt once, and for few stages, so that repeating itself buys it
    nothing."""

    def __init__(self, post: Post, height: Height) -> None:
        self._post = post
        self._height = height
        self._given: set[tuple[str, object]] = set()

    def give(self, leader: str, stage: object, seconds: float) -> None:
        """Let the leader make progress within that time before the next one takes over."""
        had = {(who, what) for who, what in self._given if who == leader}
        if (leader, stage) not in had and len(had) < STAGES_PER_LEADER:
            self._given.add((leader, stage))
            self._height.expect_progress_within(seconds, leader)

    def is_due(self, attempt: int) -> bool:
        """Whether to listen to the leader of `attempt`: nobody else is making progress now."""
        height, head = self._height, self._height.head
        if not head.has(self._post.me) or attempt < 0:
            return True  # its promise binds nobody, or is none
        now_leads = head.leader(max(height.acceptor.promised, height.awaited)).peer
        late = now_leads in self._post.host.suspects or trio.current_time() > height.stage_deadline
        return late or now_leads == head.leader(attempt).peer

    def time_for(self, plan: WorkPlan) -> float:
        """Seconds: the plan's deadline, or less where our own speed says that it asks for far too much. In a pipeline
        it says nothing of the kind, which stands still while a stage has no replica."""
        if self._post.pace.pipeline:
            return plan.deadline_s
        speed, steps = self._post.trainer.speed, self._post.pace.steps(self._height.head)
        usual = ROUND_TIME_SLACK * steps / speed + 5.0 if speed > 0 else plan.deadline_s
        return min(plan.deadline_s, UNHURRIED * usual)

    def time_after_work(self, plan: WorkPlan) -> float:
        """Seconds from the plan to the exchange, now that our own work is done and we know how long it took."""
        if not self._post.pace.pipeline:
            return self.time_for(plan)
        return UNHURRIED * (trio.current_time() - self._height.planned_at) + LAST_ONES_S
