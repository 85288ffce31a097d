"""Several states handed out by one peer: the coordinator's, which serves every stage's initial weights."""

from __future__ import annotations

from collections.abc import Sequence

from peer.net.rpc import Buffer, Call, Rpc
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateMethods, StateReply
from swarm.state.snapshots import SnapshotStore


def serve_snapshots(rpc: Rpc, stores: Sequence[SnapshotStore]) -> None:
    """Answer joiners from now on, each from the shelf that holds what it asks for. Shelves of one run may differ in the
    size of their states; answers are bounded by the largest."""
    methods = StateMethods.of(max(s.size_bytes for s in stores), max(s.part_bytes_max for s in stores))

    def holding(state_hash: bytes) -> SnapshotStore:
        return next((snapshots for snapshots in stores if state_hash in snapshots.state_hashes), stores[0])

    async def manifest(call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        return await holding(call.body.state_hash).hand_out_hashes(call)

    async def chunk(call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        return await holding(call.body.state_hash).hand_out_chunk(call)

    async def result(call: Call[AskResult]) -> ResultPart | tuple[ResultPart, Buffer]:
        return await holding(call.body.after).hand_out_result(call)

    rpc.register(methods.manifest, manifest)
    rpc.register(methods.chunk, chunk)
    rpc.register(methods.result, result)
