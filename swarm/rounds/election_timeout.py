"""How long a member waits for its leader before it lets the next one take over."""

from __future__ import annotations

from typing import Final

import trio

from swarm.protocol.plan import ROUND_TIME_SLACK, WorkPlan
from swarm.rounds.context import RoundContext
from swarm.rounds.round_state import RoundState

STAGES_PER_LEADER: Final = 5  # promises, and plan and exchange twice: then the next one takes over, it may be the fault
LAST_ONES_S: Final = 20.0  # those who are slow are asked for what they have, encode it and hand it in
UNHURRIED: Final = 4.0  # times what the peer itself would take for the whole round's steps, it waits for the others
FIRST_BATCH_S: Final = 300.0  # a synchronous pipeline's, while nothing is measured
DOUBLINGS_MAX: Final = 10


class ElectionTimeout:
    """A leader is given time for each stage of its attempt once, and for few stages, so that repeating itself buys it
    nothing.

    In a synchronous pipeline only its leader ends a round's work, and a batch stands still while some stage has no
    replica, whoever leads. Leaders then take turns, which costs the batch nothing: what is counted stays. Once
    everybody has had its time all are given time anew, and twice as much. Who has moved to another stage, or forgot in
    a restart that it was a member, never leads: it has had its turn once it is given up.
    """

    def __init__(self, context: RoundContext, round_state: RoundState) -> None:
        self._context = context
        self._round_state = round_state
        self._given: set[tuple[str, object]] = set()
        self._had_turn: set[str] = set()  # leaders that had time for the work, or were given up
        self._last = ""  # of these
        self._turns = 0  # that all have had
        self._leads = ""

    def allow(self, leader: str, stage: object, seconds: float) -> None:
        """Let the leader make progress within that time before the next one takes over."""
        if leader != self._last and self._all_had_a_turn():
            self._given.clear()
            self._had_turn.clear()
            self._turns += 1
        had = {(who, what) for who, what in self._given if who == leader}
        if (leader, stage) not in had and len(had) < STAGES_PER_LEADER:
            self._given.add((leader, stage))
            self._round_state.expect_progress_within(seconds, leader)

    def allow_work(self, leader: str, plan: bytes, seconds: float) -> None:
        """As `give`, for the work of that plan."""
        self.allow(leader, plan, seconds)
        self._note_turn(leader)

    def follow(self, leader: str) -> None:
        """From now on we wait for that one to lead: whoever it was before has had its turn."""
        if self._leads not in ("", leader):
            self._note_turn(self._leads)
        self._leads = leader

    def _note_turn(self, leader: str) -> None:
        self._had_turn.add(leader)
        self._last = leader

    def _all_had_a_turn(self) -> bool:
        alive = {member.peer for member in self._round_state.head.members} - self._context.host.suspects
        return self._context.schedule.synchronous and alive <= self._had_turn

    def is_due(self, attempt: int) -> bool:
        """Whether to listen to the leader of `attempt`: nobody else is making progress now."""
        round_state, head = self._round_state, self._round_state.head
        if not head.has(self._context.me) or attempt < 0:
            return True  # its promise binds nobody, or is none
        now_leads = head.leader(max(round_state.acceptor.promised, round_state.awaited_attempt)).peer
        late = now_leads in self._context.host.suspects or trio.current_time() > round_state.step_deadline
        return late or now_leads == head.leader(attempt).peer

    def time_for(self, plan: WorkPlan) -> float:
        """Seconds: the plan's deadline, or less where our own speed says that it asks for far too much. In a pipeline
        it says nothing of the kind, which stands still while a stage has no replica; what counts in a synchronous one
        is how long a batch usually takes."""
        if self._context.schedule.synchronous:
            usual = self._context.timeouts.batch_s
            first = UNHURRIED * usual if usual else FIRST_BATCH_S
            return min(plan.deadline_s, 2.0 ** min(self._turns, DOUBLINGS_MAX) * first)
        if self._context.schedule.pipeline:
            return plan.deadline_s
        speed, steps = self._context.trainer.speed, self._context.schedule.steps(self._round_state.head)
        usual = ROUND_TIME_SLACK * steps / speed + 5.0 if speed > 0 else plan.deadline_s
        return min(plan.deadline_s, UNHURRIED * usual)

    def time_after_work(self, plan: WorkPlan) -> float:
        """Seconds from the plan to the exchange, now that our own work is done and we know how long it took."""
        if not self._context.schedule.pipeline:
            return self.time_for(plan)
        return UNHURRIED * (trio.current_time() - self._round_state.planned_at) + LAST_ONES_S
