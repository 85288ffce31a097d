"""What peers say to each other to hand a state over. Donors: `swarm.state.snapshots`; joiners: `swarm.state.fetch`.

Every limit follows from the run's manifest (how large its state is), never from what the other side claims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from peer.checkpoint.hash_tree import chunk_size_for, hash_list_bytes
from peer.net.rpc import Method

Outcome = Literal["here", "busy", "gone"]


class AskHashes(msgspec.Struct, frozen=True):
    """Which chunks make up the state of this hash?"""

    state_hash: bytes


class AskChunk(msgspec.Struct, frozen=True):
    """Chunk `index` of the state of this hash."""

    state_hash: bytes
    index: int


class AskResult(msgspec.Struct, frozen=True):
    """Part `index` of the merged result that led on from the state `after`."""

    after: bytes
    index: int


class StateReply(msgspec.Struct, frozen=True):
    """With "here" the payload is what was asked for: all chunk hashes joined, or one chunk.

    With "busy": ask elsewhere, or here again after `retry_after_s`. With "gone": it is not on this shelf.
    """

    outcome: Outcome
    retry_after_s: float = 0.0


class ResultPart(msgspec.Struct, frozen=True):
    """With "here" the payload is one of `parts` encoded parts; they lead to the state `leads_to`, whose head
    is `head` (opaque here)."""

    outcome: Outcome
    retry_after_s: float = 0.0
    parts: int = 0
    leads_to: bytes = b""
    head: bytes = b""


@dataclass(frozen=True)
class StateMethods:
    """The calls of a run whose state has `size_bytes` and whose encoded result parts have at most
    `part_bytes_max`."""

    manifest: Method[AskHashes, StateReply]
    chunk: Method[AskChunk, StateReply]
    result: Method[AskResult, ResultPart]

    @classmethod
    def of(cls, size_bytes: int, part_bytes_max: int) -> StateMethods:
        return cls(
            Method("state.manifest", AskHashes, StateReply, reply_payload_max=hash_list_bytes(size_bytes)),
            Method("state.chunk", AskChunk, StateReply, reply_payload_max=chunk_size_for(size_bytes)),
            Method("state.result", AskResult, ResultPart, reply_payload_max=part_bytes_max),
        )
