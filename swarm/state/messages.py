"""Messages of state transfer. Donors: `swarm.state.snapshots`; joiners: `swarm.state.fetch`.

Every limit follows from the size of the run's state, which its manifest fixes, never from what the other side claims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from peer.bounds import Hash, Number, Seconds
from peer.checkpoint.hash_tree import chunk_size_for, hash_list_bytes_max
from peer.net.rpc import Method
from peer.net.wire import LARGE_HEADER_BYTES

HEAD_BYTES_MAX: Final = 1 << 20  # as the header of a message


Outcome = Literal["here", "busy", "gone"]


class AskHashes(msgspec.Struct, frozen=True):
    """Asks for the chunk hashes of a state."""

    state_hash: Hash


class AskChunk(msgspec.Struct, frozen=True):
    """Asks for one chunk of a state."""

    state_hash: Hash
    index: Number


class AskResult(msgspec.Struct, frozen=True):
    """Asks for one part of the merged result of the round after the state `after`."""

    after: Hash
    index: Number


class StateReply(msgspec.Struct, frozen=True):
    """Answers AskHashes and AskChunk. With "here" the payload is all chunk hashes joined, or one chunk."""

    outcome: Outcome
    """"gone": this donor does not hold the state."""
    retry_after_s: Seconds = 0.0
    """With "busy": when to ask again."""


class ResultPart(msgspec.Struct, frozen=True):
    """Answers AskResult. With "here" the payload is one encoded part."""

    outcome: Outcome
    retry_after_s: Seconds = 0.0
    parts: Number = 0
    """How many parts the result has."""
    leads_to: Hash = b""
    """The state hash after the round."""
    head: Annotated[bytes, msgspec.Meta(max_length=HEAD_BYTES_MAX)] = b""
    """The encoded head of that state, opaque here."""


@dataclass(frozen=True)
class StateMethods:
    """The rpc methods, with the limits of one run."""

    hashes: Method[AskHashes, StateReply]
    chunk: Method[AskChunk, StateReply]
    result: Method[AskResult, ResultPart]

    @classmethod
    def of(cls, size_bytes: int, part_bytes_max: int) -> StateMethods:
        """Return the methods for states of at most `size_bytes`, and result parts of at most `part_bytes_max`."""
        return cls(
            Method(
                "state.hashes",
                AskHashes,
                StateReply,
                reply_payload_max=hash_list_bytes_max(size_bytes),
                access="client",
                replies_bounded=True,
            ),
            Method(
                "state.chunk",
                AskChunk,
                StateReply,
                reply_payload_max=chunk_size_for(size_bytes),
                access="client",
                replies_bounded=True,
            ),
            Method(
                "state.result",
                AskResult,
                ResultPart,
                reply_payload_max=part_bytes_max,
                access="client",
                header_bytes=LARGE_HEADER_BYTES,
                replies_bounded=True,
            ),
        )
