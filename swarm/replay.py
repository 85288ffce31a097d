"""Catching up without fetching a state: apply the merged results of the few rounds that were missed.

A donor keeps the encoded results of its last rounds. Each leads from one state hash to the next, so nothing needs to be
believed: if the rebuilt state hashes to what the quorum named, it is that state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from optim.codecs import Codec
from peer.errors import BarnraiseError, ProtocolViolation
from swarm.outer_state import OuterState
from swarm.plan import SliceMap
from swarm.post import Post
from swarm.state import AskResult, StateMethods

ROUNDS_MAX: Final = 4
CALL_S: Final = 15.0


async def replay(post: Post, mine: bytes, target: bytes, donors: Sequence[str]) -> bool:
    """Bring the outer state from hash `mine` to `target`; False if no donor has the results (the state is then at
    some commit on the way, or unchanged)."""
    cut = SliceMap(post.state.numel, post.spec.up, post.spec.down)
    for donor in donors[:2]:
        try:
            for _ in range(ROUNDS_MAX):
                if mine == target:
                    return True
                mine = await _one_round(post, cut, mine, donor)
            if mine == target:
                return True
        except BarnraiseError as error:
            post.events.emit("replay_failed", peer=donor, reason=str(error))
    return False


async def _one_round(post: Post, cut: SliceMap, mine: bytes, donor: str) -> bytes:
    """Apply the result that leads on from state `mine`; returns the hash of the state it leads to."""
    sizes = [post.spec.down.encoded_size(cut.size(i)) for i in range(cut.count)]
    method = StateMethods.of(post.state.size_bytes, max(sizes)).result
    leads_to = b""
    for index in range(cut.count):
        reply = await post.host.rpc.call(donor, method, AskResult(mine, index), timeout_s=CALL_S, bulk=True)
        part = reply.body
        if part.outcome != "here" or part.parts != cut.count or len(reply.payload) != sizes[index]:
            raise ProtocolViolation("the results of the rounds that were missed are not to be had there")
        leads_to = part.leads_to
        await trio.to_thread.run_sync(_apply, post.state, cut, index, reply.payload, post.spec.down)
    if await trio.to_thread.run_sync(post.state.seal) != leads_to:
        raise ProtocolViolation("a donor's result does not lead to the state it names")
    post.state.commit(leads_to)
    return leads_to


def _apply(state: OuterState, cut: SliceMap, index: int, data: memoryview, codec: Codec) -> None:
    state.build(cut.span(index), codec, data)
