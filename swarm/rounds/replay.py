"""Catching up by replay: apply the merged results of the few missed rounds in place of fetching a whole state.

A donor keeps the encoded results of its last rounds. Each leads from one state hash to the next, so the donor need not
be trusted: if the rebuilt state has the hash that the quorum named, it is that state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import trio

from peer.decoding import MALFORMED
from peer.errors import BarnraiseError, ProtocolViolation
from swarm.protocol.head import Head
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.rounds.context import RoundContext
from swarm.state.messages import AskResult, StateMethods

ROUNDS_MAX: Final = 4
CALL_S: Final = 15.0


async def replay(context: RoundContext, mine: Head, target: bytes, donors: Sequence[str]) -> bool:
    """Bring the outer state from that of head `mine` to the one with hash `target`.

    Returns False if no donor has the results. The state is then unchanged, or that of a commit on the way."""
    for donor in donors[:2]:
        try:
            for _ in range(ROUNDS_MAX):
                if mine.state_hash == target:
                    return True
                mine = await _one_round(context, mine, donor)
            if mine.state_hash == target:
                return True
        except BarnraiseError as error:
            context.events.emit("replay_failed", peer=donor, reason=str(error))
    return False


async def _one_round(context: RoundContext, mine: Head, donor: str) -> Head:
    """Apply the results of the round after `mine`; return the next head. Only its state is proven, the rest of it is
    the donor's claim."""
    state, round_info = context.state, context.schedule.round_info(mine)
    method = StateMethods.of(state.size_bytes, SLICE_BYTES_MAX).result
    coding = await trio.to_thread.run_sync(state.strategy.coding, round_info, state.tensors)
    await trio.to_thread.run_sync(state.begin, round_info, coding)
    leads_to, head = b"", b""
    for index in range(coding.count):
        call = AskResult(mine.state_hash, index)
        reply = await context.host.rpc.call(donor, method, call, timeout_s=CALL_S, bulk=True)
        if reply.body.outcome != "here" or reply.body.parts != coding.count:
            raise ProtocolViolation("the donor does not have the results of the missed rounds")
        leads_to, head = reply.body.leads_to, reply.body.head
        await trio.to_thread.run_sync(state.build, index, reply.payload)
    if await trio.to_thread.run_sync(state.hash_next) != leads_to:
        raise ProtocolViolation("a donor's result leads to another state than it names")
    try:
        after = msgspec.msgpack.decode(head, type=Head)
    except MALFORMED as error:
        raise ProtocolViolation("a donor's result leads to a malformed head") from error
    if after.state_hash != leads_to or after.round != round_info.round:
        raise ProtocolViolation("a donor's result leads to another head than it names")
    state.commit(leads_to)
    return after
