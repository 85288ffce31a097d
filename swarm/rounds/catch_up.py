"""Bringing the state of a later head here: by the results of the missed rounds, else whole, from its holders.

No donor is trusted: the head is certified and names the hash of its state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import msgspec
import trio

from peer.catalogue.rounds import CatchUpFailed, FetchedState
from peer.decoding import MALFORMED
from peer.errors import BarnraiseError, ProtocolViolation
from swarm.protocol.agreement import events
from swarm.protocol.agreement.actions import Fetch
from swarm.protocol.head import Head
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.rounds.building import StateBuilder
from swarm.rounds.context import RoundContext
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.result_log import LoggedResult
from swarm.state.chunk_fetch import Holders
from swarm.state.fetch import fetch_state
from swarm.state.messages import AskResult, StateMethods

ROUNDS_MAX: Final = 64  # missed rounds that are replayed; donors keep fewer where a whole state is less work
DONORS_MAX: Final = 3
CALL_S: Final = 15.0
MOVED_S: Final = 5.0  # for the node to take a replayed head

Arrival = Callable[[bytes, float], Awaitable[Head]]
"""Wait until the replica is at the state with that hash, at most this many seconds; return its head."""


class CatchUp:
    """Fetches states for one replica. `donors(head)` are further peers that report this head as theirs."""

    def __init__(
        self,
        context: RoundContext,
        builder: StateBuilder,
        fetched: FetchedStates,
        donors: Callable[[Head], Iterable[str]],
        feed: Callable[[events.Event], None],
    ) -> None:
        self._context, self._builder, self._fetched = context, builder, fetched
        self._donors, self._feed = donors, feed
        self.download_bytes_s = 0.0
        """Measured; 0 while unknown."""

    async def fetch(self, action: Fetch, mine: Head, moved: Arrival) -> bool:
        """Bring the state here; return whether it is. `mine`: where this replica stands."""
        began, ok, replayed = trio.current_time(), False, False
        try:
            if action.state_hash in self._builder.holds:
                return True
            has_state = mine.state_hash == self._context.state.tree.root
            # From the run's beginning no votes lead to the next head, so the node would not move along.
            near = has_state and bool(mine.members) and 0 < action.head.round - mine.round <= ROUNDS_MAX
            replayed = near and await self._replay(action, mine, moved)
            ok = replayed or await self._whole(action)
        except BarnraiseError as error:
            self._context.events.emit(CatchUpFailed(round=action.head.round, reason=str(error)))
        if ok:
            took = round(trio.current_time() - began, 3)
            self._context.events.emit(FetchedState(round=action.head.round, replayed=replayed, seconds=took))
        return ok

    # -- results -------------------------------------------------------------------------------------------------------

    async def _replay(self, action: Fetch, mine: Head, moved: Arrival) -> bool:
        """Apply the results of the missed rounds one by one. The node moves along with each."""
        for _ in range(ROUNDS_MAX):
            leads_to = await self._one_round(mine, action.holders)
            if leads_to is None:
                return False
            if leads_to == action.state_hash:
                return True
            self._feed(events.StateFetched(leads_to, True))
            mine = await moved(leads_to, MOVED_S)
            if mine.state_hash != leads_to:
                return False
        return False

    async def _one_round(self, mine: Head, donors: Sequence[str]) -> bytes | None:
        """Build the state after `mine` from a donor's results; return its hash."""
        state = self._context.state
        method = StateMethods.of(state.size_bytes, SLICE_BYTES_MAX).result
        for donor in donors[:DONORS_MAX]:
            parts: dict[int, memoryview] = {}
            leads_to, count = b"", 1
            try:
                while len(parts) < count:
                    call = AskResult(mine.state_hash, len(parts))
                    reply = await self._context.host.rpc.call(donor, method, call, timeout_s=CALL_S, bulk=True)
                    if reply.body.outcome != "here":
                        break
                    parts[len(parts)] = reply.payload
                    leads_to, count = reply.body.leads_to, reply.body.parts
                    _check_follows(reply.body.head, mine, leads_to)
                else:
                    if await self._builder.follow(LoggedResult(mine, leads_to, [*parts.values()])):
                        return leads_to
            except BarnraiseError as error:
                self._context.events.emit("replay_failed", peer=donor, reason=str(error))
        return None

    # -- whole states --------------------------------------------------------------------------------------------------

    async def _whole(self, action: Fetch) -> bool:
        """Fetch the state. It is on disk before the node learns of it, since votes will rely on it."""
        context = self._context
        known = lambda: list(dict.fromkeys([*action.holders, *self._donors(action.head)]))  # noqa: E731
        with self._fetched.arriving(action.state_hash) as files:
            fetched = await fetch_state(
                context.host.rpc,
                Holders(known, [m.peer for m in action.head.members if m.peer != context.host.peer_id]),
                action.state_hash,
                context.state.size_bytes,
                files,
                context.events,
                len(context.state.tensors),
            )
        if fetched.seconds > 0:
            self.download_bytes_s = sum(fetched.donors.values()) / fetched.seconds
        self._builder.offer_fetched(fetched)
        return True


def _check_follows(encoded: bytes, mine: Head, leads_to: bytes) -> None:
    """Raise `ProtocolViolation` unless the donor's head is of the next round and has that state."""
    try:
        after = msgspec.msgpack.decode(encoded, type=Head)
    except MALFORMED as error:
        raise ProtocolViolation("a donor's result leads to a malformed head") from error
    if after.state_hash != leads_to or after.round != mine.round + 1:
        raise ProtocolViolation("a donor's result leads to another head than it names")
