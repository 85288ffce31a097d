"""Synchronous batches (SWARM, arXiv 2301.11913; DeDLOC, 2106.10207): the replicas of a stage together count every
sample of a round's batch exactly once; weights change at commits only.

Which replica counts a sample is the wiring's affair, so nobody knows by itself when the batch is whole: the group's
leader asks the members what they have, has issued again what is missing, and says when it is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
import trio

from peer.errors import BarnraiseError, RemoteError
from peer.events import EventLog
from peer.net.host import Host
from peer.net.rpc_server import BUSY
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.messages import COUNTED, REDISPATCH, SPANS_MAX, AskCounted, Redispatch
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import Adoption, StageTrainer, StageTrainerContext
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, contains, count, union
from swarm.protocol.round_schedule import RoundSchedule
from swarm.rounds.trainer import TrainRequest, TrainResult

POLL_S: Final = 0.2
ANSWER_S: Final = 1.0  # a member that takes longer is asked again
STALL_S: Final = 2.0  # without any growth, what is missing is issued again
STALL_FIRST_S: Final = 10.0  # the same while it is not known how long a micro-batch takes
STALL_ANSWERS: Final = 4.0


class BatchTracker:
    """Sees to it that a round's batch is counted. `issuers()`: the live replicas of stage 0; `dispatch_here` issues at
    this peer, if it is one."""

    def __init__(
        self,
        host: Host,
        rules: PipelineSettings,
        schedule: RoundSchedule,
        issuers: Callable[[], Sequence[str]],
        dispatch_here: Callable[[Sequence[Range], int], None] | None,
        events: EventLog,
    ) -> None:
        self._host, self._rules, self._schedule = host, rules, schedule
        self._issuers, self._dispatch_here = issuers, dispatch_here
        self._events = events
        self._turn = 0
        self._seen = -1  # the round that was gathered for last, whatever term that was in

    async def gather(
        self, head: Head, members: Sequence[str], server: StageServer, resumed: bool = False
    ) -> Mapping[str, Sequence[Range]]:
        """Until the members, of whom we with our `server` are one, have counted the whole batch of the round after
        `head`: also where only the next plan can merge it, for it leaves out somebody who has counted a part. Returns
        what each says it has. `resumed`: others had begun with that round, and are gone."""
        batch = self._schedule.batch(head)
        assert batch is not None
        wanted = set(range(*batch, self._rules.micro_batch))
        have: dict[str, set[int]] = {}  # first samples of what each has counted
        counted: set[int] = set()
        again, self._seen = resumed or self._seen == head.round + 1, head.round + 1
        grown_at = -math.inf if again else trio.current_time()  # what nobody is at now is lost
        while True:
            suspects = self._host.suspects
            have = {peer: firsts for peer, firsts in have.items() if peer not in suspects}
            have[self._host.peer_id] = self._firsts(server.counting.counted, batch)
            others = [m for m in members if m != self._host.peer_id and m not in suspects]
            await self._poll(head, others, have, batch)
            now, before, counted = trio.current_time(), counted, set().union(*have.values())
            if counted == wanted:
                size = self._rules.micro_batch
                return {peer: union((first, first + size) for first in firsts) for peer, firsts in have.items()}
            await self._redispatch(head, before - counted, server, "counted by a peer or a worker that is gone")
            if not counted <= before and before:
                grown_at = now
            usual_s = server.answer_s
            stall_s = max(STALL_S, STALL_ANSWERS * usual_s) if usual_s else STALL_FIRST_S
            if now - grown_at > stall_s:
                grown_at = now
                await self._redispatch(head, wanted - counted, server, "missing")
            await trio.sleep(POLL_S)

    async def _poll(self, head: Head, members: Sequence[str], have: dict[str, set[int]], batch: Range) -> None:
        """What each has; of those who do not answer, what they had."""
        ask = AskCounted(head.run_id, head.round)

        async def poll(peer: str) -> None:
            try:
                reply = await self._host.rpc.call(peer, COUNTED, ask, timeout_s=ANSWER_S)
                have[peer] = self._firsts(reply.body.spans, batch)
            except RemoteError as error:
                if error.code != BUSY:
                    have.pop(peer, None)  # it has left for another stage, with all that it had
            except BarnraiseError:
                return

        async with trio.open_nursery() as nursery:
            for peer in members:
                nursery.start_soon(poll, peer)

    async def _dispatching(self, head: Head, issuers: Sequence[str], server: StageServer) -> set[int]:
        """What replicas of stage 0 are at: it will come, or hangs like all else, and another copy would be counted
        twice."""
        batch = self._schedule.batch(head)
        assert batch is not None
        found = self._firsts(server.dispatching(), batch)
        ask = AskCounted(self._rules.groups[0], head.round)

        async def poll(peer: str) -> None:
            try:
                reply = await self._host.rpc.call(peer, COUNTED, ask, timeout_s=ANSWER_S)
                found.update(self._firsts(reply.body.dispatching, batch))
            except BarnraiseError:
                return

        async with trio.open_nursery() as nursery:
            for peer in issuers:
                if peer != self._host.peer_id:
                    nursery.start_soon(poll, peer)
        return found

    def _firsts(self, ranges: Iterable[Range], batch: Range) -> set[int]:
        """The micro-batches of the batch that lie in `ranges`, which a peer may have made up."""
        size = self._rules.micro_batch
        firsts: set[int] = set()
        for first, last in union(ranges):
            begin = max(first, batch[0])
            firsts.update(range(begin + -begin % size, min(last, batch[1]) - size + 1, size))
        return firsts

    async def _redispatch(self, head: Head, firsts: set[int], server: StageServer, reason: str) -> None:
        """By the live replicas of stage 0, in turn."""
        if not firsts:
            return
        here = {self._host.peer_id} if self._dispatch_here is not None else set()
        issuers = sorted({*self._issuers(), *here} - set(self._host.suspects))
        size = self._rules.micro_batch
        firsts = firsts - await self._dispatching(head, issuers, server)
        spans = [(first, first + size) for first in sorted(firsts)]
        if not spans or not issuers:
            return
        self._events.emit("pipeline_redispatched", samples=count(spans), round=head.round + 1, reason=reason)
        self._turn += 1
        for k, peer in enumerate(issuers):
            mine = tuple(spans[(k + self._turn) % len(issuers) :: len(issuers)][:SPANS_MAX])
            if not mine:
                continue
            if peer == self._host.peer_id and self._dispatch_here is not None:
                self._dispatch_here(mine, head.round)
                continue
            try:
                request = Redispatch(self._rules.groups[0], head.round, mine)
                await self._host.rpc.call(peer, REDISPATCH, request, timeout_s=ANSWER_S)
            except BarnraiseError as error:
                self._events.emit("redispatch_unanswered", peer=peer, reason=str(error))


class Synchronous(StageTrainer):
    """Implements `swarm.rounds.trainer.Trainer`. A round has no deadline of its own: a part of the batch is of no
    use."""

    def __init__(self, context: StageTrainerContext, tracker: BatchTracker) -> None:
        super().__init__(context)
        self._tracker = tracker
        self._losses: dict[int, tuple[int, float]] = {}  # of what was counted: first sample -> tokens, loss
        self._before: torch.Tensor | None = None  # the weights of the epoch before that of `head`, if we know them
        self._resumes = False  # a round that the group had begun with before it was regrouped

    async def gather(self, members: Sequence[str]) -> Mapping[str, Sequence[Range]]:
        await self._changed.until(lambda: self.head is not None and self._adoption is None, math.inf)
        head = self.head
        assert head is not None
        # The first stage issues its round anew, whoever was lost.
        return await self._tracker.gather(head, members, self._server, self._resumes and self._context.source is None)

    async def _train(self, request: TrainRequest) -> TrainResult:
        await self._validate_if_due()
        async with trio.open_nursery() as nursery:
            if self._context.source is not None:
                nursery.start_soon(self._dispatch_timed, request)
            await self._changed.until(lambda: self._cut_short, math.inf)
            nursery.cancel_scope.cancel()  # what is still under way is counted by somebody
        async with self._alone():
            return await self._capture()

    async def _dispatch_timed(self, request: TrainRequest) -> None:
        began = trio.current_time()
        await self._dispatch(request)
        self._note_speed(request.assignment.steps, trio.current_time() - began)

    async def _capture(self) -> TrainResult:
        """All that was counted since the last commit, in whatever plan; the worker goes on adding to it."""
        head = self.head
        assert head is not None
        taken = await self._worker_group.read_gradient()
        counted = self._ranges(taken.micro_batches)
        batch = self._context.schedule.batch(head)
        assert batch is not None
        if not contains([batch], counted):
            self._say_lost("counted out of turn", counted)
            await self._begin_anew()
            return TrainResult(0, 0, 0.0, self._worker_group.delta)
        self._counting.capture(counted)
        self.loss = self._mean_loss(self._losses) or self.loss
        steps = len(taken.micro_batches)
        return TrainResult(steps, count(counted), self.loss or 0.0, self._worker_group.delta, counted)

    def _mean_loss(self, losses: Mapping[int, tuple[int, float]]) -> float | None:
        tokens = sum(tokens for tokens, _ in losses.values())
        return math.fsum(loss for _, loss in losses.values()) / tokens if tokens else None

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        # At once, for the round that begins with this head asks; and its weights may well be those that are here.
        before = self._adoption.head if self._adoption is not None else self.head
        if before is not None and head != before:
            self._resumes = head.term > before.term and head.round <= before.round
        super().adopt(theta, changed, head)

    # -- what stays and what goes ------------------------------------------------------------------------------------

    def _may_go_on(self, request: TrainRequest) -> bool:
        return True

    def _note_counted(self, span: Range, tokens: int, loss: float) -> None:
        self._losses[span[0]] = (tokens, loss)

    def _note_lost(self) -> None:
        self._losses.clear()
        self._changed.notify()

    def _clear(self) -> None:
        self._losses.clear()

    def _keeps(self, adoption: Adoption) -> bool:
        return False

    def _settle(self) -> None:
        """All of a batch is settled with its round."""

    # -- the epoch before --------------------------------------------------------------------------------------------

    async def _import(self, adoption: Adoption) -> None:
        await trio.to_thread.run_sync(self._remember, adoption)
        await super()._import(adoption)

    def _remember(self, adoption: Adoption) -> None:
        """Stages are an epoch apart at times, and the worker that keeps the weights of the epoch before may be lost.
        Where nobody is left who has them, the present ones must do: without any, the stages behind would wait for
        ever."""
        head = adoption.head
        if adoption.orphaned:
            self._before = adoption.theta
        elif self.head is not None and head.round == self.head.round + 1:
            self._before = self._worker_group.outer.clone()
        elif head != self.head:  # else it is the same once more, after a failure
            self._before = None

    async def _load(self, head: Head) -> None:
        if self._before is not None:
            theta = self._worker_group.outer.clone()
            try:
                self._worker_group.outer.copy_(self._before)
                await self._worker_group.import_weights(head.round - 1)
            finally:
                self._worker_group.outer.copy_(theta)
        await super()._load(head)
