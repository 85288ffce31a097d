"""Whose turn it is to lead, and until when: the election timeout of the round after one head.

Attempts go round the members. A leader's turn lasts while it makes progress; each step of its attempt extends the turn
once, a bounded number of times. A leader that was given up gets no turn until all others had one, so no leader can
block the group permanently. Turns grow, so that leaders do not duel endlessly if a turn is shorter than a round.

Peers that were cut off or restarted wait for different attempts. So each announces the one it waits for, and all go to
the highest that is announced, unless their leader makes progress. A voter is followed once a turn, which bounds what a
liar can do with it. Only progress depends on any of this.
"""

from __future__ import annotations

from typing import Final

from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.round.instance import Instance
from swarm.protocol.agreement.rules.electorate import attempt_of, leader_of
from swarm.protocol.head import Member

TIMER: Final = "turn"
STEPS_PER_LEADER: Final = 8  # extensions of one leader's turns: two attempts of four steps
EXCHANGES_PER_LEADER: Final = 2  # a liar that leads could spoil each one
GROWTH: Final = 1.5
GROWN_MAX: Final = 32
ATTEMPTS_AHEAD_MAX: Final = 1 << 20  # that a leader may skip, so that numbers do not run out


class ElectionTimeouts:
    """The leader that this node waits for."""

    def __init__(self, context: AgreementContext, instance: Instance, round_s: float) -> None:
        """`round_s`: how long the last round took, 0 if unknown."""
        self._context, self._instance = context, instance
        self._turn_max_s = max(context.config.attempt_max_s, 2.0 * round_s)
        self.awaited = self._promised
        """The attempt whose leader this node waits for."""
        self.led = -1 if instance.here is not None else 0
        """The last attempt that this node has led after this head: no attempt is led twice. The first one leaves
        nothing on disk, so after a restart it counts as led."""
        self.rotations = 0
        """How often all live members have led after this head and were given up."""
        self._expired = 0
        self._until = context.now
        self._given_up: set[Member] = set()
        self._extended: dict[Member, set[tuple[int, str]]] = {}
        self._heard: dict[Member, int] = {}  # the attempt for which each voter waits
        self._followed: dict[Member, int] = {}  # how often this node has followed each voter

    @property
    def leader(self) -> Member:
        return leader_of(self._instance.head, self._instance.hash, self.awaited)

    def begin(self) -> bool:
        """Begin to wait for the first leader. Return whether it is this node."""
        self._skip_down()
        self._wait(self.turn_s)
        return self.leader == self._context.me

    @property
    def turn_s(self) -> float:
        grown = GROWTH ** min(self._expired, GROWN_MAX)
        return float(min(self._turn_max_s, self._context.config.attempt_s * grown))

    def is_over(self) -> bool:
        """Return whether the present leader's time is over, or it is down."""
        return self._context.now >= self._until or self.leader.peer in self._context.down

    def expire(self) -> None:
        """Give up the present leader and wait for the next one."""
        if self.leader.peer not in self._context.down:  # else it is skipped while it is down, and may come back
            self._given_up.add(self.leader)
        self._expired += 1
        self.awaited = max(self.awaited, self._promised) + 1
        self._skip_down()
        for voter in sorted(self._heard, key=lambda member: (-self._heard[member], member)):
            if self._follow(voter):
                break
        live = {m for m in self._instance.head.members if m.peer not in self._context.down}
        if live <= self._given_up:
            self._given_up.clear()
            self._extended.clear()
            self.rotations += 1
        self._wait(self.turn_s)
        self._announce()

    @property
    def latest(self) -> int:
        """The attempt that this node waits for or has promised."""
        return max(self.awaited, self._promised)

    @property
    def _promised(self) -> int:
        return max(0, self._instance.ballot.promised)

    def heard(self, voter: Member, attempt: int) -> bool:
        """Note for which attempt a voter waits. Return whether this node now waits for it as well: if its own leader
        makes no progress, has itself gone to that attempt, or has no quorum left."""
        head = self._instance.head
        if self._context.config.is_coordinator or not (head.has(voter) or voter == head.witness):
            return False
        self._heard[voter] = attempt
        goes_on = self._progresses() and voter != self.leader and not self._is_hopeless()
        if goes_on or not self._follow(voter):
            return False
        self._wait(self.turn_s)
        self._announce()
        return True

    def _progresses(self) -> bool:
        """Return whether a step of the present attempt was taken here; at its leader, one after its own promise."""
        if self.awaited < self._promised:
            return False
        steps = {step for attempt, step in self._extended.get(self.leader, ()) if attempt == self.awaited}
        return bool(steps - {"promise"} if self.leader == self._context.me else steps)

    def _is_hopeless(self) -> bool:
        """Return whether too many voters wait for later attempts to leave a quorum for the present one: its leader was
        frozen, say, and would wait for them as long as a plan may take.

        A witness does not count once votes are due: if its vote completed those of the others, it would have voted."""
        head, electorate = self._instance.head, self._context.electorate
        left = {voter for voter in electorate.voters(head) if self._heard.get(voter, 0) <= self.awaited}
        votes_are_due = (self.awaited, "proposal") in self._extended.get(self.leader, ())
        if electorate.mode == "witness" and votes_are_due:
            left -= {electorate.witness(head)}
        return not electorate.enough(head, left)

    def _follow(self, voter: Member) -> bool:
        """Wait for the attempt that a voter waits for, if it is later and its leader was not given up."""
        attempt, head = self._heard[voter], self._instance.head
        followed = self._followed.get(voter, 0)
        if not self.latest < attempt <= self.latest + ATTEMPTS_AHEAD_MAX:
            return False
        if leader_of(head, self._instance.hash, attempt) in self._given_up:
            return False
        if followed > self._expired:
            return False
        self._followed[voter] = followed + 1
        self.awaited = attempt
        self._skip_down()
        return True

    def _announce(self) -> None:
        """Tell the voters for which attempt this node waits."""
        instance, head, me = self._instance, self._instance.head, self._context.me
        plan, roster = instance.plan_hash, instance.roster_hash
        status = msg.StatusMessage(position_of(head), instance.hash, me, True, self.latest, plan, roster, True)
        for member in head.members:
            if member != me:
                self._context.out.send(member.peer, status)

    def is_due(self, leader: Member) -> bool:
        """Return whether this node may promise to that leader now: it is its turn, or no other leader makes
        progress."""
        if leader in (self.leader, self._context.me) or self._context.config.is_coordinator:
            return True
        return self.is_over() and leader not in self._given_up

    def granted(self, leader: Member, attempt: int) -> None:
        """Wait for the leader of an attempt that this node has promised."""
        if attempt > self.awaited:
            self.awaited = attempt
            self._announce()
        self.extend(leader, attempt, "promise", self.turn_s)

    def extend(self, leader: Member, attempt: int, step: str, seconds: float) -> None:
        """Give the leader time for the next step of its attempt, once a step."""
        steps = self._extended.setdefault(leader, set())
        if step == "roster" and sum(taken == step for _, taken in steps) >= EXCHANGES_PER_LEADER:
            return
        if leader == self.leader and (attempt, step) not in steps and len(steps) < STEPS_PER_LEADER:
            steps.add((attempt, step))
            self._wait(max(seconds, self._until - self._context.now))

    def resign(self) -> None:
        """Let the next leader try soon: this node has failed, and a plan may have made its turn long."""
        if self.leader == self._context.me:
            self._wait(min(self.turn_s, self._until - self._context.now))

    def next_attempt(self) -> int:
        """Return the number of this node's next attempt, and count it as led."""
        floor = max(self._instance.ballot.promised + 1, self.led + 1, self.awaited)
        self.led = attempt_of(self._instance.head, self._instance.hash, self._context.me, floor)
        return self.led

    def _skip_down(self) -> None:
        for _ in self._instance.head.members:
            if self.leader.peer not in self._context.down:
                return
            self.awaited += 1

    def _wait(self, seconds: float) -> None:
        self._until = self._context.now + seconds
        if not self._context.config.is_coordinator:
            self._context.out.timer(TIMER, self._until)
