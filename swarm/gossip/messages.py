"""The calls of a gossip run: two peers arrange an exchange, commit to their updates, and fetch them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from peer.bounds import SLICES_MAX, Count, Hash, Seconds
from peer.net.method import Empty
from peer.net.rpc import Method
from peer.net.wire import LARGE_HEADER_BYTES

SLICE_BYTES_MAX: Final = 9 << 20  # one slice at 32 bits a value, with room for scales

Half = Literal["phi", "delta"]
HALVES: Final[tuple[Half, Half]] = ("phi", "delta")
"""The two halves of an update, in the order in which they are exchanged: phi exists before the inner steps end."""

Verdict = Literal["come", "busy", "apart", "done"]
Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Propose(msgspec.Struct, frozen=True):
    """A proposal to exchange updates: the sender has done its inner steps after `round` rounds."""

    meeting: Id
    """Names the exchange; chosen by the sender at random."""
    round: Count
    wait_s: Seconds
    """How long the sender waits at most."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a proposal."""

    verdict: Verdict
    """ "come": agreed. "busy": ask another peer, or again. "apart": the rounds are too far apart. "done": the answerer
    has finished the run."""
    round: Count
    """The answerer's."""
    in_s: Seconds = 0.0
    """Seconds until the answerer is ready."""


class Commit(msgspec.Struct, frozen=True):
    """The blake3 hashes of the slices of one half of the sender's update. The reply commits to the answerer's."""

    meeting: Id
    half: Half
    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=SLICES_MAX)]


class Committed(msgspec.Struct, frozen=True):
    """The answerer's hashes of the same half."""

    hashes: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=SLICES_MAX)]


class AskSlice(msgspec.Struct, frozen=True):
    """A request for slice `index` of one half of the answerer's update."""

    meeting: Id
    half: Half
    index: Count


class Leave(msgspec.Struct, frozen=True):
    """The sender ends the exchange."""

    meeting: Id


class StateOffer(msgspec.Struct, frozen=True):
    """The answerer's round, and the state that may be fetched from it."""

    round: Count
    state_hash: Hash
    """Empty if the answerer serves no state."""


PROPOSE: Final = Method("gossip.propose", Propose, Answer)
COMMIT: Final = Method("gossip.commit", Commit, Committed, header_bytes=LARGE_HEADER_BYTES)
SLICE: Final = Method("gossip.slice", AskSlice, Empty, reply_payload_max=SLICE_BYTES_MAX)
LEAVE: Final = Method("gossip.leave", Leave, Empty)
OFFER_STATE: Final = Method("gossip.state", Empty, StateOffer)
