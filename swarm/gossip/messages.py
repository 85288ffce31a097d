"""What two peers of a gossip run say to each other: to arrange a meeting, to commit to a message, to fetch it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from peer.net.rpc import Method
from swarm.protocol.head import Count, Hash

SLICE_BYTES_MAX: Final = 9 << 20  # one slice at 32 bits a value, with room for scales
SLICES_MAX: Final = 1 << 16

Half = Literal["phi", "delta"]
HALVES: Final[tuple[Half, Half]] = ("phi", "delta")
"""The two halves of a message, in the order in which they are exchanged: phi is there before the work is."""

Verdict = Literal["come", "busy", "apart", "done"]
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Propose(msgspec.Struct, frozen=True):
    """The sender has done its inner steps after `round` rounds and would meet, waiting `wait_s` at most. `meeting`
    is a name it made up."""

    meeting: Id
    round: Count
    wait_s: float


class Answer(msgspec.Struct, frozen=True):
    """ "come": the answerer will be ready in about `in_s` seconds, and is spoken for until then. "busy": ask somebody
    else, or again; "apart": its `round` is too far from the sender's; "done": it has finished the run."""

    verdict: Verdict
    round: Count
    in_s: float = 0.0


class Commit(msgspec.Struct, frozen=True):
    """The blake3 hashes of the slices of one half of the sender's message. The reply commits to the answerer's."""

    meeting: Id
    half: Half
    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=SLICES_MAX)]


class Committed(msgspec.Struct, frozen=True):
    """The answerer's hashes of the same half."""

    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=SLICES_MAX)]


class AskSlice(msgspec.Struct, frozen=True):
    """Slice `index` of one half of the answerer's message, please."""

    meeting: Id
    half: Half
    index: Count


class Leave(msgspec.Struct, frozen=True):
    """The sender will not come, or not go on."""

    meeting: Id


class AskState(msgspec.Struct, frozen=True):
    """Where do you stand, and which state of yours could I fetch?"""


class StateOffer(msgspec.Struct, frozen=True):
    """`state_hash` is on the answerer's shelf; empty if nothing is."""

    round: Count
    state_hash: Hash


class Nothing(msgspec.Struct, frozen=True):
    """The empty answer."""


PROPOSE: Final = Method("gossip.propose", Propose, Answer)
COMMIT: Final = Method("gossip.commit", Commit, Committed)
SLICE: Final = Method("gossip.slice", AskSlice, Nothing, reply_payload_max=SLICE_BYTES_MAX)
LEAVE: Final = Method("gossip.leave", Leave, Nothing)
OFFER_STATE: Final = Method("gossip.state", AskState, StateOffer)
