"""What the peers of a pipeline say to each other about micro-batches.

    PASS     stage s -> s+1    a hidden state forward; its gradient is the answer
    SEEN     stage s -> s+1    who has counted these already? (before a retry)
    AWAITED  stage s+1 -> s    do you still wait for this call of yours? (before counting, when in doubt)
    COUNTED  within a group    what has this replica counted in this epoch? (its leader oversees, and asks stage 0 too)
    REISSUE  any -> stage 0    issue these once more
    TOKENS   stage 0 -> feeder the token ids of these samples

Payload limits follow from the run's rules, so methods are made for them (`PipelineCalls`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from peer.net.rpc import Method
from swarm.pipeline.activations import ActivationCode
from swarm.pipeline.config import PipelineSettings
from swarm.protocol.head import Name
from swarm.protocol.messages import Done
from swarm.protocol.plan import RANGES_MAX

SPANS_MAX: Final = 4096
TOKEN_BYTES: Final = 4
FEED_SAMPLES_MAX: Final = 64  # in one TOKENS call, unless a micro-batch is larger
REASON_MAX: Final = 400  # characters
RETRIED_MAX: Final = 1 << 20
LOSS_MAX: Final = 1e12  # nats
SECONDS_MAX: Final = 1e9

Sample = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Span = tuple[Sample, Sample]
Spans = Annotated[tuple[Span, ...], msgspec.Meta(max_length=SPANS_MAX)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Ticket = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

ForwardOutcome = Literal["done", "busy", "later", "elsewhere", "refused"]
Cause = Literal["", "stale", "shape", "value", "not_finite", "full", "early", "onward", "worker", "closing"]


class ForwardRequest(msgspec.Struct, frozen=True):
    """The payload is token ids, uint32 (batch, length + 1), then the coded hidden state (batch, length, C).

    `group`: of the stage that is called. `epoch`: the issuer's when it issued it. `again`: it may have been counted
    before, so ask who has it. `evaluate`: only the loss is wanted; nothing is counted, the answer has no payload.
    `ticket`: the caller's number for this call (see `StillWaitingQuery`).
    """

    group: Name
    span: Span
    epoch: Epoch
    batch: Size
    length: Size
    again: bool = False
    evaluate: bool = False
    ticket: Ticket = 0


class ForwardReply(msgspec.Struct, frozen=True):
    """The payload is the coded gradient of the hidden state, if `outcome` is "done" and it was no evaluation.

    busy: no place now, or nobody further on had one in time. later: the replica has not reached that epoch, or its
    worker is starting. elsewhere: it is not in that group (any more). refused: the input is wrong; `cause` says what.
    `begun`: later stages were asked and may have counted it: what follows is a retry. `loss` in nats, summed over the
    tokens. Seconds: `queued_s` of waiting here, `downstream_s` of all that the later stages took,
    `waited_s` of waiting here and in all later stages. `retried`: calls that were made once more from here on.
    ValueError where a number cannot be true.
    """

    outcome: ForwardOutcome
    cause: Cause = ""
    reason: Annotated[str, msgspec.Meta(max_length=REASON_MAX)] = ""
    retry_after_s: float = 0.0
    begun: bool = False
    loss: float = 0.0
    queued_s: float = 0.0
    downstream_s: float = 0.0
    waited_s: float = 0.0
    retried: Annotated[int, msgspec.Meta(ge=0, le=RETRIED_MAX)] = 0

    def __post_init__(self) -> None:
        seconds = (self.retry_after_s, self.queued_s, self.downstream_s, self.waited_s)
        if not abs(self.loss) <= LOSS_MAX or not all(0 <= x <= SECONDS_MAX for x in seconds):  # NaN is neither
            raise ValueError(f"a loss of {self.loss} nats, times of {seconds} seconds")


class IsCountedQuery(msgspec.Struct, frozen=True):
    """Which of these has the replica counted, or is at its backward, in work of `group` that is not merged yet?"""

    group: Name
    spans: Spans


class IsCountedReply(msgspec.Struct, frozen=True):
    counted: Annotated[tuple[bool, ...], msgspec.Meta(max_length=SPANS_MAX)]


class StillWaitingQuery(msgspec.Struct, frozen=True):
    """Does the peer that is asked still wait for the PASS that it sent to the one who asks, under this ticket?"""

    span: Span
    ticket: Ticket


class StillWaitingReply(msgspec.Struct, frozen=True):
    still: bool


class AskCounted(msgspec.Struct, frozen=True):
    group: Name
    epoch: Epoch


class Counted(msgspec.Struct, frozen=True):
    """`spans`: as many as a batch may have; empty where the replica is in another epoch. `dispatching`, on stage 0:
    what it is about to take through all stages, or is at already, of whatever epoch."""

    spans: Annotated[tuple[Span, ...], msgspec.Meta(max_length=RANGES_MAX)]
    dispatching: Spans = ()


class Redispatch(msgspec.Struct, frozen=True):
    """In a synchronous run. `spans`: of the batch of `epoch`, the replica's or the one before; others are ignored."""

    group: Name
    epoch: Epoch
    spans: Spans


class AskTokens(msgspec.Struct, frozen=True):
    """The payload of the answer is uint32 (samples, T + 1)."""

    run_id: Name
    spans: Spans


IS_COUNTED: Final = Method("pipeline.is_counted", IsCountedQuery, IsCountedReply)
STILL_WAITING: Final = Method("pipeline.still_waiting", StillWaitingQuery, StillWaitingReply)
COUNTED: Final = Method("pipeline.counted", AskCounted, Counted)
REDISPATCH: Final = Method("pipeline.redispatch", Redispatch, Done)


@dataclass(frozen=True)
class PipelineCalls:
    """The methods whose payload limits are the run's."""

    forward: Method[ForwardRequest, ForwardReply]
    tokens: Method[AskTokens, Done]

    @staticmethod
    def of(rules: PipelineSettings) -> PipelineCalls:
        hidden = ActivationCode(rules.activations).size_bytes(rules.tokens * rules.hidden_size)
        row = TOKEN_BYTES * (rules.seq_len + 1)
        return PipelineCalls(
            Method(
                "pipeline.forward",
                ForwardRequest,
                ForwardReply,
                request_payload_max=rules.micro_batch * row + hidden,
                reply_payload_max=hidden,
            ),
            Method("pipeline.tokens", AskTokens, Done, reply_payload_max=feed_samples_max(rules) * row),
        )


def feed_samples_max(rules: PipelineSettings) -> int:
    """In one TOKENS call: whole micro-batches are asked for, whose ids a PASS holds, too."""
    return max(FEED_SAMPLES_MAX, rules.micro_batch)
