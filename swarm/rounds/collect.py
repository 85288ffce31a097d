"""The leader's wait for the contributions to a plan, until all live members have submitted or a deadline passes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

import trio

from peer.errors import BarnraiseError, ProtocolViolation, RemoteError, RoundError
from peer.net.rpc_server import BUSY
from swarm.protocol.head import Member
from swarm.protocol.ledger import Range
from swarm.protocol.messages import START_ROUND, StartRound
from swarm.protocol.plan import Contribution, WorkPlan, open_contribution
from swarm.rounds.context import RoundContext
from swarm.rounds.round_state import RoundState

FINISH_EARLY_FACTOR: Final = (
    1.5  # times the median compute time, after which slow members are asked to submit what they have
)
FINISH_EARLY_SLACK_S: Final = 2.0
FINISH_EARLY_WAIT_S: Final = 8.0  # for slow members to finish their step, encode and submit
PROBE_S: Final = 1.0


class ContributionCollector:
    """Collects the contributions of the `assigned` members for one attempt.

    `finish_early` asks all of them to submit what they have. In a synchronous pipeline the trainer asks the members
    what they have counted. Peers in `doubted` are not asked. Peers that are `joining` are: one that missed a commit
    may have counted a part of the batch."""

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
        # A member that did not promise in time is not in the plan, but it may hold samples that no other will count.
        self._asked = sorted({m.peer for m in (*assigned, *round_state.head.members)}.difference(doubted))
        self._doubted, self._joining = doubted, joining
        self.claims: Mapping[str, Sequence[Range]] = {}
        """The samples that each peer (by id) says it has counted; empty until `gather` is done."""
        self._plan: WorkPlan = round_state.plan
        self._gathered = self._cut_short = False
        self._left: set[str] = set()
        self._end = max(round_state.planned_at + self._plan.deadline_s, trio.current_time()) + FINISH_EARLY_WAIT_S

    async def gather(self, scope: trio.CancelScope) -> None:
        """Wait, in `scope`, until the members together have done the round's work; then let `wait` end it."""
        with scope:
            async with trio.open_nursery() as nursery:
                if self._context.schedule.pipeline:
                    nursery.start_soon(self._probe_missing)
                self.claims = await self._context.trainer.gather(self._asked) or {}
                self._gathered = True
                self._round_state.changed.notify()

    async def wait(self, attempt: int, refused: Collection[str]) -> None:
        """Wait until every live member that took the plan has submitted, or a deadline has passed.

        `refused` are the peers that refused the plan. Raises `RoundError` if a later attempt has begun."""
        round_state = self._round_state
        took: dict[Member, float] = {}
        while round_state.decided is None:
            if round_state.acceptor.promised > attempt:
                raise RoundError("a later attempt has begun")
            now = trio.current_time()
            if self._context.schedule.synchronous:  # the trainer's `gather` rereads this list
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
        """Find members that are alive but have left for another stage.

        Once a contribution has come, send the plan again to the members that have not submitted. A member that refuses
        it has left."""
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
            return  # the heartbeat finds dead peers

    def usable(self) -> dict[Member, Contribution]:
        """Return the submitted contributions that are valid and may be merged."""
        found: dict[Member, Contribution] = {}
        for member, signed in self._round_state.submitted.items():
            if member.peer in self._context.host.suspects:
                continue
            try:
                body = open_contribution(
                    signed, self._plan, self._slices, self._round_state.head, self._context.schedule
                )
                if body.member != member:
                    raise ProtocolViolation("a contribution was submitted as another peer's")
            except ProtocolViolation as error:
                self._context.events.emit("peer_penalized", peer=member.peer, reason=str(error))
                continue
            found[member] = body
        return found

    def _is_late(self, now: float, took: Sequence[float]) -> bool:
        """Return whether most members have submitted and the others have had a fair time.

        In a pipeline the replicas of later stages stop at a common event, which an idle replica does not see; so one
        contribution is enough there. In a synchronous pipeline `gather` decides instead."""
        schedule = self._context.schedule
        enough = 1 if schedule.stage else len(self._assigned) // 2 + 1
        if schedule.synchronous or len(took) < enough:
            return False
        factor = 1.0 if schedule.stage else FINISH_EARLY_FACTOR
        return now > self._round_state.planned_at + factor * median(took) + FINISH_EARLY_SLACK_S
