"""One hop of a micro-batch: to a live replica of the next stage, and back with the gradient.

Deadlines nest. The rest of our caller's time must cover a second try at another replica, so no call gets more than
`SHARE` of it. A replica that fails or answers garbage gets this micro-batch again only after all others failed, too.
From then on the micro-batch may have been counted, so a retry first asks the replicas which of them has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from secrets import randbits
from typing import Final

import msgspec
import trio

from peer.catalogue.stages import PipelineResumed, PipelineWaiting
from peer.errors import DeadlineExceeded, NetworkError, ProtocolViolation, RemoteError, StageRefused
from peer.net.host import Host
from peer.net.rpc import Reply
from peer.net.rpc_server import UNKNOWN_METHOD
from swarm.pipeline.config import LoadReport, PipelineSettings, ReplicasOf
from swarm.pipeline.duplicate_checks import IS_COUNTED_S, find_holder
from swarm.pipeline.messages import (
    REASON_MAX,
    RETRIED_MAX,
    Cause,
    ForwardOutcome,
    ForwardReply,
    ForwardRequest,
    forward_method,
)
from swarm.pipeline.router import ReplicaRouter
from swarm.protocol.ledger import Range

SHARE: Final = 0.6  # of our caller's time, for one call
ALONE: Final = 4.0  # times the usual deadline where there is no other replica: another try would only be more work
LEAST_S: Final = 0.05  # with less left, no call is begun
IS_COUNTED_SHARE: Final = 0.2  # of our caller's time
POLL_S: Final = 0.25  # between two looks for replicas while there is none
PAUSE_MIN_S: Final = 0.01
GONE_S: Final = 30.0  # longer than a record that names a group its peer has left
LEAVING_S: Final = 60.0  # a replica that moves away serves for so long what it has counted
FAILURES_MAX: Final = 2
FOLLOW_S: Final = 120.0  # a later stage may be without replicas for about so long
REFUSALS_MAX: Final = 2  # replicas that refuse an input, or answer it with garbage: then the input is wrong


@dataclass
class _Attempt:
    """The state of one micro-batch on this hop."""

    again: bool
    until: float
    confirm: Callable[[], Awaitable[bool]] | None = None
    tries: int = 0
    """Calls so far, those included that replicas repeated further on before they declined."""
    refusals: int = 0
    begun: bool = False
    unwanted: bool = False
    """Our own caller has learnt that another replica of its stage counted the micro-batch."""
    holder: str | None = None
    """The replica that says it has counted the micro-batch, and is called for that."""
    declining_since: dict[str, float] = field(default_factory=dict)
    """By holder."""
    excluded: set[str] = field(default_factory=set)
    """Replicas that the micro-batch did not come back from."""
    failures: Counter[str] = field(default_factory=Counter)
    """By replica. At `FAILURES_MAX` a replica is not asked any more whether it is the holder."""


class Sender:
    """Sends micro-batches to the replicas of `stage`. `took(samples, peer)`: the gradient of one was taken."""

    def __init__(
        self,
        host: Host,
        settings: PipelineSettings,
        stage: int,
        replicas_of: ReplicasOf,
        took: Callable[[Range, str], None],
    ) -> None:
        self.router: Final = ReplicaRouter(Random(host.peer_id).getrandbits(32))
        self.stage: Final = stage
        self._host, self._method, self._group = host, forward_method(settings), settings.groups[stage]
        self._replicas_of, self._took = replicas_of, took
        self._known: dict[str, LoadReport] = {}
        self._gone: dict[str, tuple[float, float]] = {}  # not in the group: its record's time, when we learnt it
        self._numbers = count(randbits(48))  # numbers of an earlier sender of this peer are not used again
        self._open: dict[int, tuple[str, Range, _Attempt]] = {}  # calls that we wait for, by their number
        self._left: dict[str, float] = {}  # replicas whose records have gone since: they may be about to leave
        self._ignored_holders: set[str] = set()  # they claimed a micro-batch and declined it for too long
        self._stranded = 0  # micro-batches that wait because the stage has no live replica

    async def waits_for(self, peer: str, samples: Range, number: int) -> bool:
        """Return whether we, and all senders before us, still wait for the answer of `peer` to this call."""
        call = self._open.get(number)
        if call is None or call[:2] != (peer, samples):
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
        accept: Callable[[Reply[ForwardReply]], Awaitable[None]],
        until: float = math.inf,
        confirm: Callable[[], Awaitable[bool]] | None = None,
    ) -> ForwardReply:
        """Have `request` answered by a replica, and the answer accepted, before the time `until`. `confirm` asks our
        own caller whether it still waits. If `accept` raises ProtocolViolation (the answer is garbage) or StageRefused
        ("not_finite": it is unusable), there is a retry; any other error ends `send`.

        The result is the accepted answer, or else the reply to our own caller; its `retried` includes the calls that
        were repeated on this hop.
        """
        attempt = _Attempt(request.again, until, confirm)
        while True:
            left_s = until - trio.current_time()
            if left_s < LEAST_S:
                return _undelivered(attempt, "busy", "onward", f"no replica of stage {self.stage} answered in time")
            if attempt.unwanted:
                return _undelivered(attempt, "busy", "onward", "it is counted by another replica")
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
        self,
        peer: str,
        request: ForwardRequest,
        payload: memoryview,
        accept: Callable[[Reply[ForwardReply]], Awaitable[None]],
        attempt: _Attempt,
    ) -> ForwardReply | None:
        """Make one call. None: try again, possibly at another replica."""
        router, number = self.router, next(self._numbers)
        timeout = 1.0 if self._others_than(peer) else ALONE
        timeout_s = min(timeout * router.deadline_s(peer), SHARE * (attempt.until - trio.current_time()))
        request = msgspec.structs.replace(request, group=self._group, again=attempt.again, ticket=number)
        router.sent(peer, number, trio.current_time())
        answered_at = None
        try:
            self._open[number] = (peer, request.samples, attempt)
            try:
                reply = await self._call(peer, request, payload, timeout_s)
            finally:
                del self._open[number]
            answer = reply.body
            answered_at = trio.current_time()
            if answer.outcome == "done":
                await accept(reply)
        except (NetworkError, ProtocolViolation, StageRefused) as error:
            if isinstance(error, RemoteError) and error.code == UNKNOWN_METHOD:
                return await self._declined(peer, number, ForwardReply("elsewhere"), attempt)
            if isinstance(error, StageRefused) and error.reason != "not_finite":
                router.cancelled(peer, number)  # our own stage's problem
                raise
            router.failed(peer, number, trio.current_time())
            attempt.again = attempt.begun = True
            attempt.excluded.add(peer)
            attempt.failures[peer] += 1 if answered_at is None else FAILURES_MAX
            if answered_at is not None and isinstance(error, ProtocolViolation):
                self._host.rpc.server.penalize(peer, f"{self._method.name}: its answer: {error}")
            if isinstance(error, StageRefused):
                attempt.refusals += 1
                if attempt.refusals >= REFUSALS_MAX or not self._others(attempt):
                    return _undelivered(attempt, "refused", "not_finite", str(error)[:REASON_MAX])
            return None
        except BaseException:
            router.cancelled(peer, number)  # otherwise it would stay overdue
            raise
        if answer.outcome == "done":
            router.succeeded(peer, number, answered_at, answer.downstream_s, answer.queued_s)
            self._ignored_holders.discard(peer)
            if not request.evaluate:
                self._took(request.samples, peer)
            retried = min(answer.retried + attempt.tries - 1, RETRIED_MAX)
            return msgspec.structs.replace(answer, retried=retried)
        attempt.begun |= answer.begun
        attempt.again |= answer.begun
        return await self._declined(peer, number, answer, attempt)

    async def _declined(self, peer: str, number: int, answer: ForwardReply, attempt: _Attempt) -> ForwardReply | None:
        """Handle the answer of a `peer` that has not done it."""
        router, now = self.router, trio.current_time()
        attempt.tries += answer.retried
        if peer == attempt.holder and now - attempt.declining_since.setdefault(peer, now) > FOLLOW_S:
            self._ignored_holders.add(peer)
        if answer.outcome == "elsewhere":
            router.cancelled(peer, number)
            self._gone[peer] = (self._known[peer].at if peer in self._known else 0.0, now)
            return None
        if answer.outcome == "refused":
            router.cancelled(peer, number)
            attempt.refusals += 1
            attempt.excluded.add(peer)
            if answer.cause == "stale" or attempt.refusals >= REFUSALS_MAX or not self._others(attempt):
                return _undelivered(attempt, "refused", answer.cause, answer.reason)
            return None
        router.declined(peer, number, now)
        pause_s = router.pause_s(now)
        if answer.outcome == "later" or not self._others_than(peer):
            pause_s = max(pause_s, min(answer.retry_after_s, 1.0))
        await trio.sleep(min(max(PAUSE_MIN_S, pause_s), max(0.0, attempt.until - now)))
        return None

    async def _choose(self, request: ForwardRequest, attempt: _Attempt) -> str | None:
        """Return the holder of a micro-batch that may have been counted, else the router's choice; None if there is no
        replica."""
        attempt.holder = None
        if attempt.again and not request.evaluate:
            attempt.holder = await self._find_holder(request.samples, attempt)
            if attempt.holder is not None:
                return attempt.holder
        chosen = self.router.choose(trio.current_time(), exclude=attempt.excluded)
        if chosen is None and self.router.replicas:  # all of them have failed
            await trio.sleep(min(POLL_S, max(0.0, attempt.until - trio.current_time())))
            attempt.excluded.clear()
            chosen = self.router.choose(trio.current_time())
        return chosen

    async def _find_holder(self, samples: Range, attempt: _Attempt) -> str | None:
        """Return the first live replica that says it has counted `samples`, or None if none does in time."""
        there = {*self.router.replicas, *self._left} - set(self._host.suspects)
        believed = (peer for peer in sorted(there) if peer not in self._ignored_holders)
        asked = [peer for peer in believed if attempt.failures[peer] < FAILURES_MAX]
        timeout_s = min(IS_COUNTED_S, IS_COUNTED_SHARE * (attempt.until - trio.current_time()))
        return await find_holder(self._host, self._group, samples, asked, timeout_s)

    async def _call(
        self, peer: str, request: ForwardRequest, payload: memoryview, timeout_s: float
    ) -> Reply[ForwardReply]:
        """Call the replica. Raises as Rpc.call, and DeadlineExceeded when the heartbeat finds the peer dead or frozen
        meanwhile."""
        reply: Reply[ForwardReply] | None = None
        failure: NetworkError | ProtocolViolation | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal failure
                await self._host.wait_suspect(peer)
                failure = DeadlineExceeded(f"{peer} was found dead or frozen")
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                # Bulk transport: 15 to 60 percent less CPU for calls of 16 KB to 4 MB (8 and 24 at once, busy cores).
                reply = await self._host.rpc.call(peer, self._method, request, payload, timeout_s=timeout_s, bulk=True)
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
                self._host.events.emit(PipelineWaiting(stage=self.stage))
            while not self.router.replicas:
                left_s = attempt.until - trio.current_time()
                if left_s < LEAST_S:
                    return
                await trio.sleep(min(POLL_S, left_s))
                self._look()
        finally:
            self._stranded -= 1
            if not self._stranded and self.router.replicas:
                self._host.events.emit(PipelineResumed(stage=self.stage))

    def _look(self) -> None:
        """Bring the router up to date with the records and with the heartbeat."""
        now, suspects = trio.current_time(), self._host.suspects
        found = {peer: load for peer, load in self._replicas_of(self.stage).items() if peer not in suspects}
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
        self._left |= dict.fromkeys(self._known.keys() - found.keys() - set(suspects), now)
        self._left = {p: at for p, at in self._left.items() if p not in found and now - at < LEAVING_S}
        self._known = found
        self._ignored_holders &= found.keys()

    def _others(self, attempt: _Attempt) -> bool:
        return any(peer not in attempt.excluded for peer in self.router.replicas)

    def _others_than(self, peer: str) -> bool:
        return any(other != peer for other in self.router.replicas)


def _undelivered(attempt: _Attempt, outcome: ForwardOutcome, cause: Cause, reason: str) -> ForwardReply:
    retried = min(max(0, attempt.tries - 1), RETRIED_MAX)
    return ForwardReply(outcome, cause, reason, begun=attempt.begun, retried=retried)
