"""One hop of a micro-batch: to some live replica of the next stage, and back with the gradient.

Deadlines nest: what is left of our own caller's must cover a second try elsewhere, so no call gets more than `SHARE`
of it. Whoever fails, or answers garbage, gets this micro-batch again only when all others failed too, and what follows
says that it may have been counted: then replicas are asked first who has it, and it goes there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from secrets import randbits
from typing import Final

import msgspec
import trio

from peer.errors import DeadlineExceeded, NetworkError, ProtocolViolation, RemoteError, StageRefused
from peer.net.host import Host
from peer.net.rpc import Reply
from peer.net.rpc_server import UNKNOWN_METHOD
from swarm.pipeline.config import LoadReport
from swarm.pipeline.duplicate_checks import IS_COUNTED_S, Confirm, who_has
from swarm.pipeline.messages import REASON_MAX, Cause, ForwardOutcome, ForwardReply, ForwardRequest, PipelineCalls
from swarm.pipeline.router import ReplicaRouter
from swarm.protocol.ledger import Range

SHARE: Final = 0.6  # of our caller's time, for one call
ALONE: Final = 4.0  # times the usual deadline: where nobody else could do it, another try is only more work
LEAST_S: Final = 0.05  # with less left, no call is begun
SEEN_SHARE: Final = 0.2
POLL_S: Final = 0.25  # replicas are looked up so often while there is none
PAUSE_MIN_S: Final = 0.01
GONE_S: Final = 30.0  # longer than any record says that somebody is where it is not
FAILURES_MAX: Final = 2
FOLLOW_S: Final = 120.0  # a stage further on may be without replicas for about so long
REFUSALS_MAX: Final = 2  # two replicas that refuse an input, or answer it to no avail, are right about it

Replicas = Callable[[], Mapping[str, LoadReport]]
Accept = Callable[[Reply[ForwardReply]], Awaitable[None]]
"""What is done with an answer. ProtocolViolation (it is garbage) and StageRefused ("not_finite": it does no good) mean
a retry; anything else ends `send`."""


@dataclass(frozen=True)
class Delivered:
    """It came back, after `tries` calls: also those that replicas made once more further on before they declined it."""

    passed: ForwardReply
    tries: int


@dataclass(frozen=True)
class Undelivered:
    """It did not, in time; what to tell our own caller."""

    outcome: ForwardOutcome
    cause: Cause
    reason: str
    begun: bool
    tries: int


@dataclass
class _Attempt:
    """What is known of one micro-batch on this hop. `strayed`: replicas it did not come back from. `failures` of each:
    at `FAILURES_MAX` it is not followed there any more, even if it was counted there. `holder`: who has it, by its own
    word, and is asked for that; `held_up`: since when such a one has declined. `unwanted`: whoever we have it from has
    learnt that it is counted by another."""

    again: bool
    until: float
    confirm: Confirm | None = None
    tries: int = 0
    refusals: int = 0
    begun: bool = False
    unwanted: bool = False
    holder: str | None = None
    held_up: dict[str, float] = field(default_factory=dict)
    strayed: set[str] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)


class Sender:
    """Sends micro-batches to the replicas of `group` (stage `stage`), as `replicas` lists them at any time."""

    def __init__(
        self,
        host: Host,
        calls: PipelineCalls,
        group: str,
        stage: int,
        replicas: Replicas,
        router: ReplicaRouter | None = None,
    ) -> None:
        self.router: Final = router or ReplicaRouter(Random(host.peer_id).getrandbits(32))
        self.stage: Final = stage
        self._host, self._calls, self._group, self._replicas = host, calls, group, replicas
        self._known: dict[str, LoadReport] = {}
        self._gone: dict[str, tuple[float, float]] = {}  # not in the group: its record's time, when we learnt it
        self._numbers = count(randbits(48))  # no sender that was here before has used them
        self._open: dict[int, tuple[str, Range, _Attempt]] = {}  # calls that we wait for, by their number
        self._not_followed: set[str] = set()  # said so long that they have it, and declined, that we believe it no more
        self._stranded = 0  # micro-batches that wait, as no replica of the stage is alive

    async def awaits(self, peer: str, span: Range, number: int) -> bool:
        """Whether we wait for the answer of `peer` to this call, and so do all that it came through before us."""
        call = self._open.get(number)
        if call is None or call[:2] != (peer, span):
            return False
        attempt = call[2]
        try:
            attempt.unwanted |= attempt.confirm is not None and not await attempt.confirm()
        except StageRefused:
            return False
        return not attempt.unwanted and number in self._open

    async def send(
        self,
        request: ForwardRequest,
        payload: memoryview,
        accept: Accept,
        until: float = math.inf,
        confirm: Confirm | None = None,
    ) -> Delivered | Undelivered:
        """Have `request` answered, and the answer accepted, by some replica before the time `until`. `confirm` asks
        whoever we have it from."""
        attempt = _Attempt(request.again, until, confirm)
        while True:
            left_s = until - trio.current_time()
            if left_s < LEAST_S:
                return _too_late(self.stage, attempt)
            if attempt.unwanted:
                return Undelivered("busy", "onward", "it is counted by another replica", attempt.begun, attempt.tries)
            self._look()
            peer = await self._choose(request, attempt)
            if peer is None:
                await self._wait_for_replicas(attempt)
                continue
            attempt.tries += 1
            ended = await self._try(peer, request, payload, accept, attempt)
            if ended is not None:
                return ended

    async def _try(
        self, peer: str, request: ForwardRequest, payload: memoryview, accept: Accept, attempt: _Attempt
    ) -> Delivered | Undelivered | None:
        """One call; None: go on elsewhere."""
        router, number = self.router, next(self._numbers)
        timeout = 1.0 if self._others_than(peer) else ALONE
        timeout_s = min(timeout * router.deadline_s(peer), SHARE * (attempt.until - trio.current_time()))
        request = msgspec.structs.replace(request, group=self._group, again=attempt.again, ticket=number)
        router.sent(peer, number, trio.current_time())
        answered_at = None
        try:
            self._open[number] = (peer, request.span, attempt)
            try:
                reply = await self._call(peer, request, payload, timeout_s)
            finally:
                del self._open[number]
            passed = reply.body
            answered_at = trio.current_time()
            if passed.outcome == "done":
                await accept(reply)
        except (NetworkError, ProtocolViolation, StageRefused) as error:
            if isinstance(error, RemoteError) and error.code == UNKNOWN_METHOD:
                return await self._declined(peer, number, ForwardReply("elsewhere"), attempt)
            if isinstance(error, StageRefused) and error.reason != "not_finite":
                router.cancelled(peer, number)  # our own stage's affair
                raise
            router.failed(peer, number, trio.current_time())
            attempt.again = attempt.begun = True
            attempt.strayed.add(peer)
            attempt.failures[peer] += 1 if answered_at is None else FAILURES_MAX
            if answered_at is not None and isinstance(error, ProtocolViolation):
                self._host.rpc.server.strike(peer, f"{self._calls.forward.name}: its answer: {error}")
            if isinstance(error, StageRefused):
                attempt.refusals += 1
                if attempt.refusals >= REFUSALS_MAX or not self._others(attempt):
                    return Undelivered("refused", "not_finite", str(error)[:REASON_MAX], True, attempt.tries)
            return None
        except BaseException:
            router.cancelled(peer, number)  # so that it does not seem overdue for ever
            raise
        if passed.outcome == "done":
            router.succeeded(peer, number, answered_at, passed.downstream_s, passed.queued_s)
            self._not_followed.discard(peer)
            return Delivered(passed, attempt.tries)
        attempt.begun |= passed.begun
        attempt.again |= passed.begun
        return await self._declined(peer, number, passed, attempt)

    async def _declined(self, peer: str, number: int, passed: ForwardReply, attempt: _Attempt) -> Undelivered | None:
        """`peer` answered that it has not done it."""
        router, now = self.router, trio.current_time()
        attempt.tries += passed.retried
        if peer == attempt.holder and now - attempt.held_up.setdefault(peer, now) > FOLLOW_S:
            self._not_followed.add(peer)
        if passed.outcome == "elsewhere":
            router.cancelled(peer, number)
            self._gone[peer] = (self._known[peer].at if peer in self._known else 0.0, now)
            return None
        if passed.outcome == "refused":
            router.cancelled(peer, number)
            attempt.refusals += 1
            attempt.strayed.add(peer)
            if passed.cause == "stale" or attempt.refusals >= REFUSALS_MAX or not self._others(attempt):
                return Undelivered("refused", passed.cause, passed.reason, attempt.begun, attempt.tries)
            return None
        router.declined(peer, number, now)
        pause_s = router.pause_s(now)
        if passed.outcome == "later" or not self._others_than(peer):
            pause_s = max(pause_s, min(passed.retry_after_s, 1.0))
        await trio.sleep(min(max(PAUSE_MIN_S, pause_s), max(0.0, attempt.until - now)))
        return None

    async def _choose(self, request: ForwardRequest, attempt: _Attempt) -> str | None:
        """Who has it already, if it may have been counted; else whom the wiring names. None if nobody is left."""
        attempt.holder = None
        if attempt.again and not request.evaluate:
            attempt.holder = await self._who_has(request.span, attempt)
            if attempt.holder is not None:
                return attempt.holder
        chosen = self.router.choose(trio.current_time(), exclude=attempt.strayed)
        if chosen is None and self.router.replicas:  # all have failed
            await trio.sleep(min(POLL_S, max(0.0, attempt.until - trio.current_time())))
            attempt.strayed.clear()
            chosen = self.router.choose(trio.current_time())
        return chosen

    async def _who_has(self, span: Range, attempt: _Attempt) -> str | None:
        """The first live replica to say that it has counted `span`; None if none does in time."""
        followed = (peer for peer in self.router.replicas if peer not in self._not_followed)
        asked = [peer for peer in followed if attempt.failures[peer] < FAILURES_MAX]
        timeout_s = min(IS_COUNTED_S, SEEN_SHARE * (attempt.until - trio.current_time()))
        return await who_has(self._host, self._group, span, asked, timeout_s)

    async def _call(
        self, peer: str, request: ForwardRequest, payload: memoryview, timeout_s: float
    ) -> Reply[ForwardReply]:
        """Raises as Rpc.call; DeadlineExceeded too when the heartbeat finds the peer dead or frozen meanwhile."""
        reply: Reply[ForwardReply] | None = None
        failure: NetworkError | ProtocolViolation | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal failure
                await self._host.wait_suspect(peer)
                failure = DeadlineExceeded(f"{peer} was found dead or frozen.")
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                # By the bulk lane: 15 to 60 percent less CPU a call of 16 KB to 4 MB (8 and 24 at once, busy cores).
                reply = await self._host.rpc.call(
                    peer, self._calls.forward, request, payload, timeout_s=timeout_s, bulk=True
                )
            except (NetworkError, ProtocolViolation) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if reply is not None:
            return reply
        assert failure is not None
        raise failure

    async def _wait_for_replicas(self, attempt: _Attempt) -> None:
        self._stranded += 1
        try:
            if self._stranded == 1:
                self._host.events.emit("pipeline_waiting", stage=self.stage)
            while not self.router.replicas:
                left_s = attempt.until - trio.current_time()
                if left_s < LEAST_S:
                    return
                await trio.sleep(min(POLL_S, left_s))
                self._look()
        finally:
            self._stranded -= 1
            if not self._stranded and self.router.replicas:
                self._host.events.emit("pipeline_resumed", stage=self.stage)

    def _look(self) -> None:
        """Bring the wiring up to date with the records, and with the heartbeat of those that it watches."""
        now, suspects = trio.current_time(), self._host.suspects
        found = {peer: load for peer, load in self._replicas().items() if peer not in suspects}
        for peer, (at, since) in list(self._gone.items()):
            if peer not in found or found[peer].at != at or now - since > GONE_S:
                del self._gone[peer]
            else:
                del found[peer]
        if found == self._known:
            return
        self.router.update(found, now)
        for peer, load in found.items():
            if self._known.get(peer) != load:
                self.router.published(peer, load.queue, load.service_s, 0.0)
        self._known = found
        self._not_followed &= found.keys()

    def _others(self, attempt: _Attempt) -> bool:
        return any(peer not in attempt.strayed for peer in self.router.replicas)

    def _others_than(self, peer: str) -> bool:
        return any(other != peer for other in self.router.replicas)


def _too_late(stage: int, attempt: _Attempt) -> Undelivered:
    reason = f"no replica of stage {stage} answered in time"
    return Undelivered("busy", "onward", reason, attempt.begun, attempt.tries)
