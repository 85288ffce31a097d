"""The leader waits for a plan's work: for everybody who is alive, but not for ever."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

import trio

from peer.errors import BarnraiseError, ProtocolViolation, RemoteError, RoundError
from peer.identity import Signed
from peer.net.rpc_server import BUSY
from swarm.protocol.head import Member
from swarm.protocol.messages import WORK, Work
from swarm.protocol.plan import Contribution, WorkPlan, open_contribution
from swarm.rounds.context import RoundContext
from swarm.rounds.round_state import RoundState
from swarm.rounds.trainer import Claims

WRAP_UP_FACTOR: Final = 1.5  # times the median compute time, then the slow are asked for what they have
WRAP_UP_SLACK_S: Final = 2.0
WRAP_UP_WAIT_S: Final = 8.0  # for them to finish their step, encode and hand in
ROLL_CALL_S: Final = 1.0


class AttemptFailed(RoundError):
    """This attempt decides nothing; another one will."""


class HandedIn(NamedTuple):
    """A contribution as it was signed, and what it says."""

    signed: Signed
    body: Contribution


class ContributionCollector:
    """Of one attempt: the contributions of those `assigned`. `hurry` asks all of them for what they have. `claims`:
    what each said it has once all was gathered; those `doubted` are not asked. `knocking()`: peers outside
    the group. Who missed a commit is one, and counts its part of the batch all the same."""

    def __init__(
        self,
        post: RoundContext,
        height: RoundState,
        slices: int,
        assigned: Sequence[Member],
        hurry: Callable[[], Awaitable[None]],
        doubted: Collection[str] = (),
        knocking: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        assert height.plan is not None
        self._post, self._height = post, height
        self._slices = slices
        self._assigned = assigned
        self._hurry = hurry
        # Who did not answer in time is not in the plan, but goes on counting: nobody else will count what it has.
        self._asked = sorted({m.peer for m in (*assigned, *height.head.members)}.difference(doubted))
        self._doubted, self._knocking = doubted, knocking
        self.claims: Claims = {}
        self._plan: WorkPlan = height.plan
        self._gathered = self._hurried = False
        self._left: set[str] = set()
        self._end = max(height.planned_at + self._plan.deadline_s, trio.current_time()) + WRAP_UP_WAIT_S

    async def gather(self, scope: trio.CancelScope) -> None:
        """Have all wrap up when together they have done what the round needs, in `scope`."""
        with scope:
            async with trio.open_nursery() as nursery:
                if self._post.pace.pipeline:
                    nursery.start_soon(self._call_the_roll)
                self.claims = await self._post.trainer.gather(self._asked) or {}
                self._gathered = True
                self._height.changed.notify()

    async def wait(self, attempt: int, refused: Collection[str]) -> None:
        """Until there is nobody left to wait for. `refused`: peers that did not take the plan. `AttemptFailed` if a
        later attempt has begun."""
        height = self._height
        took: dict[Member, float] = {}
        while height.decided is None:
            if height.acceptor.promised > attempt:
                raise AttemptFailed("a later attempt has begun")
            now = trio.current_time()
            if self._post.pace.synchronous:  # whoever gathers looks at this list again and again
                self._asked += [peer for peer in self._knocking() if peer not in {*self._asked, *self._doubted}]
            for member in height.handed_in:
                took.setdefault(member, now - height.planned_at)
            waiting = self._waited_for(refused)
            if not waiting or now >= self._end:
                return
            if not self._hurried and (self._gathered or self._is_late(now, list(took.values()))):
                self._hurried = True
                self._end = min(self._end, now + WRAP_UP_WAIT_S)
                await self._hurry()
                continue
            await height.changed.wait(0.25)

    def _waited_for(self, refused: Collection[str]) -> list[Member]:
        away = {*refused, *self._left, *self._post.host.suspects}
        return [m for m in self._assigned if m not in self._height.handed_in and m.peer not in away]

    async def _call_the_roll(self) -> None:
        """Who has moved to another stage is alive, but follows the plan no more: once somebody has handed in, those who
        have not are told of it again, and whoever knows nothing of it has left."""
        me, signed = self._post.me.peer, self._height.signed_plan
        assert signed is not None
        while True:
            await trio.sleep(ROLL_CALL_S)
            if not self._height.handed_in:
                continue
            async with trio.open_nursery() as nursery:
                for member in self._waited_for(()):
                    if member.peer != me:
                        nursery.start_soon(self._call, member.peer, Work(signed, wrap_up=self._hurried))

    async def _call(self, peer: str, work: Work) -> None:
        try:
            await self._post.host.rpc.call(peer, WORK, work, timeout_s=self._post.tempo.answer_s)
        except RemoteError as error:
            if error.code != BUSY:
                self._left.add(peer)
                self._height.changed.notify()
        except BarnraiseError:
            return  # the heartbeat will tell

    def usable(self) -> dict[Member, HandedIn]:
        """What has come and may be merged."""
        found: dict[Member, HandedIn] = {}
        for member, signed in self._height.handed_in.items():
            if member.peer in self._post.host.suspects:
                continue
            try:
                body = open_contribution(signed, self._plan, self._slices, self._height.head, self._post.pace)
                if body.member != member:
                    raise ProtocolViolation("a contribution was handed in as another peer's")
            except ProtocolViolation as error:
                self._post.events.emit("peer_struck", peer=member.peer, reason=str(error))
                continue
            found[member] = HandedIn(signed, body)
        return found

    def _is_late(self, now: float, took: Sequence[float]) -> bool:
        """Whether most have handed in, and the others had as much time again as may be expected of them. In a pipeline
        the stages after the first all stop at the same event, which who has done nothing does not see; in a synchronous
        one whoever gathers says when."""
        pace = self._post.pace
        enough = 1 if pace.stage else len(self._assigned) // 2 + 1
        if pace.synchronous or len(took) < enough:
            return False
        factor = 1.0 if pace.stage else WRAP_UP_FACTOR
        return now > self._height.planned_at + factor * median(took) + WRAP_UP_SLACK_S
