"""The calls between the peers of a pipeline.

    FORWARD        stage s -> s+1     a hidden state; the answer is its gradient
    IS_COUNTED     stage s -> s+1     which of these have you counted? (before a retry; also within stage 0)
    STILL_WAITING  stage s+1 -> s     do you still wait for this FORWARD? (before counting what may be a duplicate)
    COUNTED        within a group     what have you counted in this epoch? (its leader asks; stage 0 is asked, too)
    REDISPATCH     any -> stage 0     dispatch these micro-batches again
    RECEIPT        stage s+1 -> s     sign for the gradients of these that you have taken from me (for a contribution)
    TOKENS         stage 0 -> feeder  the token ids of these samples

Payload limits of FORWARD and TOKENS follow from the run's settings: see `forward_method`, `tokens_method`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from peer.bounds import Hash, Loss, Name, Number, Seconds
from peer.errors import ProtocolViolation
from peer.identity import Signed
from peer.net.method import Empty
from peer.net.rpc import Method
from peer.net.wire import LARGE_HEADER_BYTES, Buffer
from swarm.pipeline.activations import ActivationCode
from swarm.pipeline.config import PipelineSettings
from swarm.protocol.ledger import Range
from swarm.protocol.plan import RANGES_MAX

SAMPLE_RANGES_MAX: Final = 4096
RANGES_HEADER_BYTES: Final = 128 << 10  # holds that many ranges, at 19 bytes each
TOKEN_BYTES: Final = 4
FEED_SAMPLES_MAX: Final = 64  # in one TOKENS call, unless a micro-batch is larger
REASON_MAX: Final = 400  # characters
RETRIED_MAX: Final = 1 << 20

SampleRanges = Annotated[tuple[Range, ...], msgspec.Meta(max_length=SAMPLE_RANGES_MAX)]
Dimension = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]

ForwardOutcome = Literal["done", "busy", "later", "elsewhere", "refused"]
"""busy: the replica, or every replica further on, is full. later: the replica has not reached the epoch, or its worker
is starting. elsewhere: the replica is not in that group. refused: the input is wrong."""
Cause = Literal["", "stale", "shape", "value", "not_finite", "full", "early", "onward", "worker", "closing"]


class ForwardRequest(msgspec.Struct, frozen=True):
    """The payload is token ids, int32 (batch, length + 1), -1 - id where one does not count in the loss, then the coded
    hidden state (batch, length, C)."""

    group: Name
    """Group of the called replica."""
    samples: Range
    epoch: Number
    """Epoch of the stage-0 replica at the dispatch."""
    batch: Dimension
    length: Dimension
    again: bool = False
    """The micro-batch may have been counted before: look for its holder first."""
    evaluate: bool = False
    """Only the loss is wanted. Nothing is counted, and the answer has no payload."""
    ticket: Number = 0
    """The caller's number for this call; see `StillWaitingQuery`."""


class ForwardReply(msgspec.Struct, frozen=True):
    """The answer to FORWARD. The payload is the coded gradient of the hidden state, unless `outcome` is another than
    "done" or the call was an evaluation."""

    outcome: ForwardOutcome
    cause: Cause = ""
    reason: Annotated[str, msgspec.Meta(max_length=REASON_MAX)] = ""
    """The cause in words."""
    retry_after_s: Seconds = 0.0
    begun: bool = False
    """Later stages were called and may have counted the micro-batch: what follows is a retry."""
    loss: Loss = 0.0
    """Nats, summed over the tokens."""
    queued_s: Seconds = 0.0
    """Waiting at this replica."""
    downstream_s: Seconds = 0.0
    """Everything at later stages."""
    waited_s: Seconds = 0.0
    """Waiting at this replica and at all later stages."""
    retried: Annotated[int, msgspec.Meta(ge=0, le=RETRIED_MAX)] = 0
    """Calls repeated from this replica on."""


class IsCountedQuery(msgspec.Struct, frozen=True):
    """Asks which of these the replica has counted for `group`, or has in their backward, and not merged yet."""

    group: Name
    ranges: SampleRanges


class IsCountedReply(msgspec.Struct, frozen=True):
    counted: Annotated[tuple[bool, ...], msgspec.Meta(max_length=SAMPLE_RANGES_MAX)]


class StillWaitingQuery(msgspec.Struct, frozen=True):
    """Asks whether the called peer still waits for the FORWARD that it sent to the caller under this ticket."""

    samples: Range
    ticket: Number


class StillWaitingReply(msgspec.Struct, frozen=True):
    still: bool


class AskCounted(msgspec.Struct, frozen=True):
    group: Name
    epoch: Number


class Counted(msgspec.Struct, frozen=True):
    """The samples that a replica has counted, and on stage 0 those that it is dispatching."""

    ranges: Annotated[tuple[Range, ...], msgspec.Meta(max_length=RANGES_MAX)]
    """Empty where the replica is in another epoch."""
    dispatching: SampleRanges = ()
    """In flight or planned, of any epoch."""


class Redispatch(msgspec.Struct, frozen=True):
    """Asks a stage-0 replica to dispatch again: in a synchronous run what a batch lacks, else what its group has merged
    and a later stage has lost."""

    group: Name
    epoch: Number
    ranges: SampleRanges
    """In a synchronous run in the batch of `epoch`, which is the replica's or the one before; others are ignored."""


class AskReceipt(msgspec.Struct, frozen=True):
    """Asks for a receipt for gradients that the caller has returned (`swarm.protocol.receipts`)."""

    head: Hash
    """The last head of the caller's group."""
    ranges: SampleRanges


class Receipt(msgspec.Struct, frozen=True):
    receipt: Signed
    """A `ReceiptBody`, for those of the samples whose gradient was last taken from the caller."""


class AskTokens(msgspec.Struct, frozen=True):
    """Asks a feeder for token ids. The payload of the answer is int32 (samples, T + 1), as in `ForwardRequest`."""

    run_id: Name
    ranges: SampleRanges


RECEIPT: Final = Method("pipeline.receipt", AskReceipt, Receipt, header_bytes=RANGES_HEADER_BYTES)
IS_COUNTED: Final = Method("pipeline.is_counted", IsCountedQuery, IsCountedReply, header_bytes=RANGES_HEADER_BYTES)
STILL_WAITING: Final = Method("pipeline.still_waiting", StillWaitingQuery, StillWaitingReply)
COUNTED: Final = Method("pipeline.counted", AskCounted, Counted, header_bytes=LARGE_HEADER_BYTES)
REDISPATCH: Final = Method("pipeline.redispatch", Redispatch, Empty, header_bytes=RANGES_HEADER_BYTES)


def forward_method(settings: PipelineSettings) -> Method[ForwardRequest, ForwardReply]:
    hidden = ActivationCode(settings.activations).size_bytes(settings.tokens * settings.hidden_size)
    return Method(
        "pipeline.forward",
        ForwardRequest,
        ForwardReply,
        request_payload_max=token_bytes(settings.micro_batch, settings.seq_len) + hidden,
        reply_payload_max=hidden,
    )


def tokens_method(settings: PipelineSettings) -> Method[AskTokens, Empty]:
    return Method(
        "pipeline.tokens",
        AskTokens,
        Empty,
        reply_payload_max=token_bytes(feed_samples_max(settings), settings.seq_len),
        header_bytes=RANGES_HEADER_BYTES,
    )


def encode_tokens(tokens: Tensor) -> memoryview:
    """Return token ids (n, T + 1) int64 as they cross the wire."""
    return tokens.numpy().astype("<i4").data.cast("B")


def decode_tokens(payload: Buffer, settings: PipelineSettings, length: int) -> Tensor:
    """Return what `encode_tokens` was given, of sequences of `length` + 1 tokens. Raises ProtocolViolation for ids
    outside the vocabulary, and for marks in a run without."""
    tokens = np.frombuffer(payload, "<i4").reshape(-1, length + 1)
    ids = np.where(tokens < 0, ~tokens, tokens) if settings.marked else tokens
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= settings.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ProtocolViolation(f"token id {wrong} in a vocabulary of {settings.vocab_size}")
    return torch.from_numpy(tokens.astype(np.int64))


def token_bytes(batch: int, length: int) -> int:
    """Return the bytes of the token ids of a micro-batch."""
    return TOKEN_BYTES * batch * (length + 1)


def feed_samples_max(settings: PipelineSettings) -> int:
    """Return how many samples one TOKENS call may ask for: at least a whole micro-batch."""
    return max(FEED_SAMPLES_MAX, settings.micro_batch)
