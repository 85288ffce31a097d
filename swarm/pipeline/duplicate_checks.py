"""Checks before a micro-batch is counted that may be a duplicate: which replica has counted it already, and does the
sender still wait for it?

A micro-batch that comes through in time costs no question.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.errors import NetworkError, ProtocolViolation, StageRefused
from peer.net.host import Host
from swarm.pipeline.messages import IS_COUNTED, STILL_WAITING, IsCountedQuery, StillWaitingQuery
from swarm.protocol.ledger import Range

IS_COUNTED_S: Final = 0.5
STILL_WAITING_S: Final = 2.0
SURE_S: Final = 4.0  # a micro-batch is wanted for so long after it came: the heartbeat gives a frozen peer up after 5 s
SURE_SHARE: Final = 0.5  # the same as a share of the caller's time
BACKLOG_S: Final = 2.0  # a call read so soon after a standstill of our loop may have waited in a buffer
CHECKS_MAX: Final = 3
SUSPICIONS_PER_PEER: Final = 2  # a retry asks when it begins and before it is counted; further questions are ignored


@dataclass(eq=False)
class DuplicateCheck:
    """Decides before the backward of one micro-batch whether it is still to be counted.

    The sender may have abandoned it: this process was frozen, was cut off, or took long. Another peer may have asked
    for its holder in order to send it elsewhere. In these cases `confirm` is called; without a `confirm` nothing is
    asked.
    """

    confirm: Callable[[], Awaitable[bool]] | None = None
    """Asks whether the micro-batch is still to be counted here. A later stage asks the sender, and through it all
    senders before it: StageRefused ("cancelled") if one of them has stopped waiting. Stage 0 asks its other replicas:
    False if one of them has counted the micro-batch."""
    until: float = math.inf
    """When the caller gives up, in trio's time."""
    began: float = field(default_factory=trio.current_time)
    maybe_duplicate: bool = False
    """There is a reason to ask."""
    _wanted_at: float = field(default_factory=trio.current_time)  # when it was last wanted for sure
    _suspicions: Counter[str] = field(default_factory=Counter)  # by the peer that raised them

    def suspect(self, asker: str) -> None:
        """Note that `asker` looks for the micro-batch's holder, and may send it elsewhere."""
        if self._suspicions[asker] < SUSPICIONS_PER_PEER:
            self._suspicions[asker] += 1
            self.maybe_duplicate = True

    async def is_wanted(self, stood_still_until: Callable[[], float]) -> bool:
        """Return whether the micro-batch is still to be counted. There is no checkpoint between a True and the return,
        so the caller can act on it at once. Raises StageRefused ("cancelled")."""
        checks = 0
        while self.confirm is not None and self._is_due(stood_still_until()):
            if checks == CHECKS_MAX:
                raise StageRefused("it is unclear whether this micro-batch is still wanted: send it again", "cancelled")
            checks += 1
            asked = trio.current_time()
            self.maybe_duplicate = False
            if not await self.confirm():
                return False
            self._wanted_at = asked
        return True

    def _is_due(self, stood_still_until: float) -> bool:
        sure_s = min(SURE_S, SURE_SHARE * (self.until - self.began))
        late = trio.current_time() - self._wanted_at > sure_s and not math.isinf(self.until)
        return self.maybe_duplicate or late or stood_still_until > self._wanted_at


async def find_holder(host: Host, group: str, samples: Range, peers: Iterable[str], timeout_s: float) -> str | None:
    """Return the first of the live `peers` that says it has counted `samples`, or None if none does in time."""
    holder: str | None = None
    async with trio.open_nursery() as nursery:

        async def ask(peer: str) -> None:
            nonlocal holder
            try:
                reply = await host.rpc.call(peer, IS_COUNTED, IsCountedQuery(group, (samples,)), timeout_s=timeout_s)
            except (NetworkError, ProtocolViolation):
                return
            if reply.body.counted == (True,):
                holder = peer
                nursery.cancel_scope.cancel()

        for peer in peers:
            nursery.start_soon(ask, peer)
    return holder


async def still_waits(host: Host, peer: str, samples: Range, ticket: int) -> bool:
    """Return whether `peer` says that it still waits for its call `ticket` to us; no answer is a no."""
    try:
        reply = await host.rpc.call(peer, STILL_WAITING, StillWaitingQuery(samples, ticket), timeout_s=STILL_WAITING_S)
    except (NetworkError, ProtocolViolation):
        return False
    return reply.body.still
