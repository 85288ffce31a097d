"""The election timeout of a round: how long a member waits for its leader."""

from __future__ import annotations

from typing import Final

import trio

from swarm.protocol.plan import ROUND_TIME_SLACK, WorkPlan
from swarm.rounds.context import RoundContext
from swarm.rounds.round_state import RoundState

STEPS_PER_LEADER: Final = 5  # extensions: the promises, and twice a plan and an exchange
SUBMIT_SLACK_S: Final = 20.0  # for slow members to be asked, to encode and to submit
WAIT_FACTOR: Final = 4.0  # times the time that this peer would take for all steps of the round
FIRST_BATCH_S: Final = 300.0  # for a synchronous pipeline's batch, while nothing is measured
DOUBLINGS_MAX: Final = 10


class ElectionTimeout:
    """Decides when to stop waiting for the current leader (Raft's election timeout).

    Each step of an attempt extends the deadline once, at most `STEPS_PER_LEADER` times a leader, so a faulty leader
    cannot stall the round by repeating messages.

    In a synchronous pipeline a batch stands still while some stage has no replica. Leaders then rotate; nothing
    that was counted is lost. Once all live members have led or were given up, all may extend the deadline
    again, and the time for a batch doubles. A member that never leads (it has moved to another stage, or has restarted
    and forgotten its membership) counts as having led once it is given up.
    """

    def __init__(self, context: RoundContext, round_state: RoundState) -> None:
        self._context = context
        self._round_state = round_state
        self._allowed: set[tuple[str, object]] = set()  # (leader, step) of each extension
        self._have_led: set[str] = set()  # leaders that had time for the work, or were given up
        self._last_led = ""  # the latest of these
        self._rotations = 0  # times that all live members have led
        self._leader = ""

    def allow(self, leader: str, step: object, seconds: float) -> None:
        """Allow the leader that time for a step of its attempt, unless it had time for it before."""
        if leader != self._last_led and self._all_have_led():
            self._allowed.clear()
            self._have_led.clear()
            self._rotations += 1
        before = {(peer, what) for peer, what in self._allowed if peer == leader}
        if (leader, step) not in before and len(before) < STEPS_PER_LEADER:
            self._allowed.add((leader, step))
            self._round_state.expect_progress_within(seconds, leader)

    def allow_work(self, leader: str, plan: bytes, seconds: float) -> None:
        """Allow the leader that time for the work of the plan with that hash."""
        self.allow(leader, plan, seconds)
        self._note_led(leader)

    def follow(self, leader: str) -> None:
        """Wait for this leader from now on. Another one before it is given up."""
        if self._leader not in ("", leader):
            self._note_led(self._leader)
        self._leader = leader

    def _note_led(self, leader: str) -> None:
        self._have_led.add(leader)
        self._last_led = leader

    def _all_have_led(self) -> bool:
        alive = {member.peer for member in self._round_state.head.members} - self._context.host.suspects
        return self._context.schedule.synchronous and alive <= self._have_led

    def is_due(self, attempt: int) -> bool:
        """Return whether this member may promise to the leader of `attempt`: no other leader is making progress."""
        round_state, head = self._round_state, self._round_state.head
        if not head.has(self._context.me) or attempt < 0:
            return True  # the promise of a non-member does not count; a negative attempt is refused later
        current = head.leader(max(round_state.acceptor.promised, round_state.awaited_attempt)).peer
        late = current in self._context.host.suspects or trio.current_time() > round_state.step_deadline
        return late or current == head.leader(attempt).peer

    def time_for(self, plan: WorkPlan) -> float:
        """Return the seconds to wait for the work of a plan.

        That is the plan's deadline, or less if this peer's own speed shows that the deadline is far too long. A
        pipeline stands still while a stage has no replica, so there the own speed shows nothing; in a synchronous one
        the usual time of a batch does."""
        if self._context.schedule.synchronous:
            usual = self._context.timeouts.batch_s
            first = WAIT_FACTOR * usual if usual else FIRST_BATCH_S
            return min(plan.deadline_s, 2.0 ** min(self._rotations, DOUBLINGS_MAX) * first)
        if self._context.schedule.pipeline:
            return plan.deadline_s
        speed, steps = self._context.trainer.speed, self._context.schedule.steps(self._round_state.head)
        usual = ROUND_TIME_SLACK * steps / speed + 5.0 if speed > 0 else plan.deadline_s
        return min(plan.deadline_s, WAIT_FACTOR * usual)

    def time_after_work(self, plan: WorkPlan) -> float:
        """Return the seconds from the plan to the exchange, now that this peer's own work is done."""
        if not self._context.schedule.pipeline:
            return self.time_for(plan)
        return WAIT_FACTOR * (trio.current_time() - self._round_state.planned_at) + SUBMIT_SLACK_S
