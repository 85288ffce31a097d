"""What one peer knows and has promised about the round that follows one head. Held in memory, dropped at the commit."""

from __future__ import annotations

from collections.abc import Callable

import trio

from peer.identity import Signed
from swarm.protocol.head import Head, Member
from swarm.protocol.paxos import Acceptor, VoteCount
from swarm.protocol.plan import WorkPlan
from swarm.rounds.contribution import EncodedUpdate
from swarm.rounds.exchange import ButterflyAllReduce, MergePlan, RoundSlices


class Notifier:
    """A broadcast: wakes everybody who waits."""

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
        """Wait until `ready()` holds, re-checking at every notification; False if `timeout_s` passed first."""
        with trio.move_on_after(timeout_s):
            while not ready():
                await self._event.wait()
        return ready()


class RoundState:
    """`plan`/`contribution`/`message`: the work adopted and what came of it; `submitted`: what the leader has
    collected; `exchanges`: by roster hash; `sealed`: the head that the next outer state stands for; `decided`: the
    committed head.

    `before`: the height left last. Where a peer comes back to the same head, because it could not fetch a better one,
    its promises and votes stay, or the round could be decided twice."""

    def __init__(self, head: Head, me: Member, before: RoundState | None = None) -> None:
        same = before if before is not None and before.head == head else None
        self.head: Head = head
        self.me = me
        self.acceptor: Acceptor = same.acceptor if same else Acceptor()
        self.votes: VoteCount = same.votes if same else VoteCount(head)
        self.exchanges: dict[bytes, ButterflyAllReduce] = same.exchanges if same else {}
        self.plan: WorkPlan | None = None
        self.signed_plan: Signed | None = None
        self.planned_at = 0.0
        self.contribution: Signed | None = None
        self.update: EncodedUpdate | None = None
        self.submitted: dict[Member, Signed] = {}
        self.slices = RoundSlices()
        self.current: ButterflyAllReduce | None = None
        self.candidate: Head | None = None
        self.built_by: ButterflyAllReduce | None = None
        self.decided: Head | None = None
        self.left_out = False
        self.awaited_attempt = 0  # the attempt that this peer leads or waits for
        self.step_deadline = trio.current_time()
        self.awaited_leader = ""  # the leader (peer id) to whom that deadline was given
        self.changed = Notifier()

    def drop_work(self) -> None:
        """Forget the plan and everything computed under it."""
        self.plan = self.signed_plan = self.contribution = self.update = self.current = None
        self.submitted = {}
        self.slices = RoundSlices()
        self.changed.notify()

    def expect_progress_within(self, seconds: float, leader: str) -> None:
        """The leader shows a sign of progress before this, or the next one takes over."""
        self.awaited_leader = leader
        self.step_deadline = trio.current_time() + seconds
        self.changed.notify()

    def remember(self, exchange: ButterflyAllReduce) -> None:
        """Keep its results for others, besides those that led to the vote; of earlier attempts nothing is kept."""
        voted = self.acceptor.accepted.roster if self.acceptor.accepted is not None else b""
        for key in [key for key in self.exchanges if key != voted]:
            del self.exchanges[key]
        self.exchanges[exchange.key] = exchange

    def merge_of_vote(self) -> MergePlan | None:
        """What led to the head voted for."""
        accepted = self.acceptor.accepted
        exchange = self.exchanges.get(accepted.roster) if accepted is not None else None
        return exchange.merge if exchange is not None else None
