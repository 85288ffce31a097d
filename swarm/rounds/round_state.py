"""What one member knows and has promised for the round after one head. Held in memory, dropped at the commit."""

from __future__ import annotations

from collections.abc import Callable

import trio

from peer.identity import Signed
from swarm.protocol.head import Head, Member
from swarm.protocol.paxos import Acceptor, VoteCount
from swarm.protocol.plan import WorkPlan
from swarm.rounds.contribution import EncodedUpdate
from swarm.rounds.exchange import ButterflyAllReduce, MergePlan


class Notifier:
    """A broadcast that wakes all waiting tasks."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = trio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next notification, `timeout_s` at most."""
        with trio.move_on_after(timeout_s):
            await self._event.wait()

    async def until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()` holds, checked at every notification. Return False if `timeout_s` passes first."""
        with trio.move_on_after(timeout_s):
            while not ready():
                await self._event.wait()
        return ready()


class RoundState:
    """What this member knows and has promised for the round after `head`. In memory only."""

    def __init__(self, head: Head, me: Member, previous: RoundState | None = None) -> None:
        """`previous` is the state of the last round tried. If the peer returns to the same head, promises and votes are
        carried over; losing them could let two different heads be chosen."""
        same = previous if previous is not None and previous.head == head else None
        self.head: Head = head
        self.me = me
        self.acceptor: Acceptor = same.acceptor if same else Acceptor()
        self.votes: VoteCount = same.votes if same else VoteCount(head)
        self.exchanges: dict[bytes, ButterflyAllReduce] = same.exchanges if same else {}
        """The latest exchange, and the one that led to this member's vote, by roster hash."""
        self.plan: WorkPlan | None = None
        """The plan this member has accepted."""
        self.signed_plan: Signed | None = None
        self.planned_at = 0.0
        self.contribution: Signed | None = None
        """This member's contribution under `plan`, once computed."""
        self.update: EncodedUpdate | None = None
        """The update that `contribution` commits to."""
        self.submitted: dict[Member, Signed] = {}
        """Contributions collected by this member as the leader."""
        self.received: dict[tuple[int, str], tuple[bytes, memoryview]] = {}
        """Other contributors' slices, kept over all attempts under `plan`."""
        self.delivered: set[tuple[int, str]] = set()
        """(index, owner) of own slices that have arrived, kept over all attempts under `plan`."""
        self.current: ButterflyAllReduce | None = None
        """The exchange of the present attempt."""
        self.candidate: Head | None = None
        """The head that the completed next state leads to; this member votes for it."""
        self.built_by: ButterflyAllReduce | None = None
        """The exchange that led to `candidate`."""
        self.decided: Head | None = None
        """The committed head."""
        self.left_out = False
        """Whether the plan or the roster left this member out."""
        self.awaited_attempt = 0
        """The attempt that this member leads or waits for."""
        self.awaited_leader = ""
        """The leader (peer id) that has until `step_deadline`."""
        self.step_deadline = trio.current_time()
        self.changed = Notifier()

    def drop_work(self) -> None:
        """Forget the plan and everything computed under it."""
        self.plan = self.signed_plan = self.contribution = self.update = self.current = None
        self.submitted, self.received, self.delivered = {}, {}, set()
        self.changed.notify()

    def expect_progress_within(self, seconds: float, leader: str) -> None:
        """Set the deadline for the leader's next sign of progress."""
        self.awaited_leader = leader
        self.step_deadline = trio.current_time() + seconds
        self.changed.notify()

    def remember(self, exchange: ButterflyAllReduce) -> None:
        """Keep an exchange, whose results others may fetch. Of earlier ones, keep only that of this member's vote."""
        voted = self.acceptor.accepted.roster if self.acceptor.accepted is not None else b""
        for key in [key for key in self.exchanges if key != voted]:
            del self.exchanges[key]
        self.exchanges[exchange.key] = exchange

    def merge_of_vote(self) -> MergePlan | None:
        """Return what was merged for the head that this member voted for."""
        accepted = self.acceptor.accepted
        exchange = self.exchanges.get(accepted.roster) if accepted is not None else None
        return exchange.merge if exchange is not None else None
