"""The states that one peer serves: of its group, of the coordinator each stage's initial one, and parts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from peer.net.rpc import Buffer, Call, Rpc
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateMethods, StateReply


class StateStore(Protocol):
    """States by hash, and the results between them."""

    @property
    def size_bytes(self) -> int:
        """The size of the largest state."""

    @property
    def part_bytes_max(self) -> int:
        """The size of the largest part of a result."""

    def serves(self, state_hash: bytes) -> bool:
        """Return whether a joiner can get that state here now."""
        ...

    async def send_hashes(self, call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for the chunk hashes of a state."""
        ...

    async def send_chunk(self, call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for one chunk of a state."""
        ...

    async def send_result(self, call: Call[AskResult]) -> ResultPart | tuple[ResultPart, Buffer]:
        """Answer a request for one part of a round's merged result."""
        ...


def serve_snapshots(rpc: Rpc, stores: Sequence[StateStore]) -> None:
    """Answer joiners from now on, each from the store that holds what it asks for.

    The stores of one run may differ in the size of their states. Answers are bounded by the largest.
    """
    methods = StateMethods.of(max(s.size_bytes for s in stores), max(s.part_bytes_max for s in stores))

    def holding(state_hash: bytes) -> StateStore:
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
