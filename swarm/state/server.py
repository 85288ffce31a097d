"""The states that one peer serves: of its group, and by the coordinator every stage's initial weights."""

from __future__ import annotations

from collections.abc import Sequence

from peer.net.rpc import Buffer, Call, Rpc
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateMethods, StateReply
from swarm.state.snapshots import SnapshotStore


def serve_snapshots(rpc: Rpc, stores: Sequence[SnapshotStore]) -> None:
    """Answer joiners from now on, each from the store that holds what it asks for.

    The stores of one run may differ in the size of their states. Answers are bounded by the largest.
    """
    methods = StateMethods.of(max(s.size_bytes for s in stores), max(s.part_bytes_max for s in stores))

    def holding(state_hash: bytes) -> SnapshotStore:
        return next((store for store in stores if store.serves(state_hash)), stores[0])

    async def hashes(call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        return await holding(call.body.state_hash).send_hashes(call)

    async def chunk(call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        return await holding(call.body.state_hash).send_chunk(call)

    async def result(call: Call[AskResult]) -> ResultPart | tuple[ResultPart, Buffer]:
        return await holding(call.body.after).send_result(call)

    rpc.register(methods.hashes, hashes)
    rpc.register(methods.chunk, chunk)
    rpc.register(methods.result, result)
