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
from swarm.protocol.messages import START_ROUND, StartRound
from swarm.protocol.plan import Contribution, WorkPlan, open_contribution
from swarm.rounds.context import RoundContext
from swarm.rounds.round_state import RoundState
from swarm.rounds.trainer import Claims

FINISH_EARLY_FACTOR: Final = 1.5  # times the median compute time, then the slow are asked for what they have
FINISH_EARLY_SLACK_S: Final = 2.0
FINISH_EARLY_WAIT_S: Final = 8.0  # for them to finish their step, encode and hand in
PROBE_S: Final = 1.0


class AttemptFailed(RoundError):
    """This attempt decides nothing; another one will."""


class Submission(NamedTuple):
    """A contribution as it was signed, and what it says."""

    signed: Signed
    body: Contribution


class ContributionCollector:
    """Of one attempt: the contributions of those `assigned`. `finish_early` asks all of them for what they have.
    `claims`: what each said it has once all was gathered; those `doubted` are not asked. `joining()`: peers outside
    the group. Who missed a commit is one, and counts its part of the batch all the same."""

    def __init__(
        self,
        context: RoundContext,
        round_state: RoundState,
        slices: int,
        assigned: Sequence[Member],
        finish_early: Callable[[], Awaitable[None]],
        doubted: Collection[str] = (),
        joining: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        assert round_state.plan is not None
        self._context, self._round_state = context, round_state
        self._slices = slices
        self._assigned = assigned
        self._finish_early = finish_early
        # Who did not answer in time is not in the plan, but goes on counting: nobody else will count what it has.
        self._asked = sorted({m.peer for m in (*assigned, *round_state.head.members)}.difference(doubted))
        self._doubted, self._joining = doubted, joining
        self.claims: Claims = {}
        self._plan: WorkPlan = round_state.plan
        self._gathered = self._cut_short = False
        self._left: set[str] = set()
        self._end = max(round_state.planned_at + self._plan.deadline_s, trio.current_time()) + FINISH_EARLY_WAIT_S

    async def gather(self, scope: trio.CancelScope) -> None:
        """Have all wrap up when together they have done what the round needs, in `scope`."""
        with scope:
            async with trio.open_nursery() as nursery:
                if self._context.schedule.pipeline:
                    nursery.start_soon(self._probe_missing)
                self.claims = await self._context.trainer.gather(self._asked) or {}
                self._gathered = True
                self._round_state.changed.notify()

    async def wait(self, attempt: int, refused: Collection[str]) -> None:
        """Until there is nobody left to wait for. `refused`: peers that did not take the plan. `AttemptFailed` if a
        later attempt has begun."""
        round_state = self._round_state
        took: dict[Member, float] = {}
        while round_state.decided is None:
            if round_state.acceptor.promised > attempt:
                raise AttemptFailed("a later attempt has begun")
            now = trio.current_time()
            if self._context.schedule.synchronous:  # whoever gathers looks at this list again and again
                self._asked += [peer for peer in self._joining() if peer not in {*self._asked, *self._doubted}]
            for member in round_state.submitted:
                took.setdefault(member, now - round_state.planned_at)
            waiting = self._waited_for(refused)
            if not waiting or now >= self._end:
                return
            if not self._cut_short and (self._gathered or self._is_late(now, list(took.values()))):
                self._cut_short = True
                self._end = min(self._end, now + FINISH_EARLY_WAIT_S)
                await self._finish_early()
                continue
            await round_state.changed.wait(0.25)

    def _waited_for(self, refused: Collection[str]) -> list[Member]:
        away = {*refused, *self._left, *self._context.host.suspects}
        return [m for m in self._assigned if m not in self._round_state.submitted and m.peer not in away]

    async def _probe_missing(self) -> None:
        """Who has moved to another stage is alive, but follows the plan no more: once somebody has handed in, those who
        have not are told of it again, and whoever knows nothing of it has left."""
        me, signed = self._context.me.peer, self._round_state.signed_plan
        assert signed is not None
        while True:
            await trio.sleep(PROBE_S)
            if not self._round_state.submitted:
                continue
            async with trio.open_nursery() as nursery:
                for member in self._waited_for(()):
                    if member.peer != me:
                        nursery.start_soon(self._call, member.peer, StartRound(signed, finish_early=self._cut_short))

    async def _call(self, peer: str, work: StartRound) -> None:
        try:
            await self._context.host.rpc.call(peer, START_ROUND, work, timeout_s=self._context.timeouts.answer_s)
        except RemoteError as error:
            if error.code != BUSY:
                self._left.add(peer)
                self._round_state.changed.notify()
        except BarnraiseError:
            return  # the heartbeat will tell

    def usable(self) -> dict[Member, Submission]:
        """What has come and may be merged."""
        found: dict[Member, Submission] = {}
        for member, signed in self._round_state.submitted.items():
            if member.peer in self._context.host.suspects:
                continue
            try:
                body = open_contribution(
                    signed, self._plan, self._slices, self._round_state.head, self._context.schedule
                )
                if body.member != member:
                    raise ProtocolViolation("a contribution was handed in as another peer's")
            except ProtocolViolation as error:
                self._context.events.emit("peer_penalized", peer=member.peer, reason=str(error))
                continue
            found[member] = Submission(signed, body)
        return found

    def _is_late(self, now: float, took: Sequence[float]) -> bool:
        """Whether most have handed in, and the others had as much time again as may be expected of them. In a pipeline
        the stages after the first all stop at the same event, which who has done nothing does not see; in a synchronous
        one whoever gathers says when."""
        schedule = self._context.schedule
        enough = 1 if schedule.stage else len(self._assigned) // 2 + 1
        if schedule.synchronous or len(took) < enough:
            return False
        factor = 1.0 if schedule.stage else FINISH_EARLY_FACTOR
        return now > self._round_state.planned_at + factor * median(took) + FINISH_EARLY_SLACK_S
