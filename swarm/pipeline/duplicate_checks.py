"""What is asked about a micro-batch that might be counted twice: who has it already, and does its sender still wait?

Both only where there is doubt: a micro-batch in time costs no question.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from peer.errors import NetworkError, ProtocolViolation
from peer.net.host import Host
from swarm.pipeline.messages import IS_COUNTED, STILL_WAITING, IsCountedQuery, StillWaitingQuery
from swarm.protocol.ledger import Range

IS_COUNTED_S: Final = 0.5
STILL_WAITING_S: Final = 2.0

Confirm = Callable[[], Awaitable[bool]]
"""Whether a micro-batch is still to be counted here, as far as whoever brought it knows, and whoever that had it from.
StageRefused ("cancelled") where nobody waits for its answer. At stage 0: whether no other replica of it has counted it;
one that is only to pass through there has nothing to confirm, and is awaited for as long as its call is open."""


async def who_has(host: Host, group: str, span: Range, peers: Iterable[str], timeout_s: float) -> str | None:
    """The first of the live `peers` to say that it has counted `span`; None if none does in time."""
    holder: str | None = None
    async with trio.open_nursery() as nursery:

        async def ask(peer: str) -> None:
            nonlocal holder
            try:
                seen = await host.rpc.call(peer, IS_COUNTED, IsCountedQuery(group, (span,)), timeout_s=timeout_s)
            except (NetworkError, ProtocolViolation):
                return
            if seen.body.counted == (True,):
                holder = peer
                nursery.cancel_scope.cancel()

        for peer in peers:
            nursery.start_soon(ask, peer)
    return holder


async def is_awaited(host: Host, peer: str, span: Range, ticket: int) -> bool:
    """Whether `peer` says that it still waits for its call `ticket` to us; no word is a no."""
    try:
        reply = await host.rpc.call(peer, STILL_WAITING, StillWaitingQuery(span, ticket), timeout_s=STILL_WAITING_S)
    except (NetworkError, ProtocolViolation):
        return False
    return reply.body.still
