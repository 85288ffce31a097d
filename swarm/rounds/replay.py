"""Catching up without fetching a state: apply the merged results of the few rounds that were missed.

A donor keeps the encoded results of its last rounds. Each leads from one state hash to the next, so nothing needs to be
believed: if the rebuilt state hashes to what the quorum named, it is that state.
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
    """Bring the outer state from that of the head `mine` to the one with hash `target`; False if no donor has the
    results (the state is then at some commit on the way, or unchanged)."""
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
    """Apply the result that leads on from the state of `mine`; returns the head it leads to, which is as good as the
    donor's word: only its state is proven."""
    state, round_info = context.state, context.schedule.round_info(mine)
    method = StateMethods.of(state.size_bytes, SLICE_BYTES_MAX).result
    coding = await trio.to_thread.run_sync(state.strategy.coding, round_info, state.tensors)
    await trio.to_thread.run_sync(state.begin, round_info, coding)
    leads_to, head = b"", b""
    for index in range(coding.count):
        call = AskResult(mine.state_hash, index)
        reply = await context.host.rpc.call(donor, method, call, timeout_s=CALL_S, bulk=True)
        if reply.body.outcome != "here" or reply.body.parts != coding.count:
            raise ProtocolViolation("the results of the rounds that were missed are not to be had there")
        leads_to, head = reply.body.leads_to, reply.body.head
        await trio.to_thread.run_sync(state.build, index, reply.payload)
    if await trio.to_thread.run_sync(state.seal) != leads_to:
        raise ProtocolViolation("a donor's result does not lead to the state it names")
    try:
        after = msgspec.msgpack.decode(head, type=Head)
    except MALFORMED as error:
        raise ProtocolViolation("a donor's result leads to a malformed head") from error
    if after.state_hash != leads_to or after.round != round_info.round:
        raise ProtocolViolation("a donor's result leads to another head than it names")
    state.commit(leads_to)
    return after
