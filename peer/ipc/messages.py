"""What the network process and a compute worker say to each other: typed messages in length-prefixed msgpack frames.

The two ends are one program on one machine, so a malformed frame is our own bug and may raise. Tensors never come
this way: they lie in shared memory (`peer.ipc.shared_memory`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.ipc.inner_orders import InnerRunOptions
from peer.ipc.stage_messages import StageCommand, StageReply
from peer.ipc.stage_spec import StageSpec

_LENGTH = struct.Struct(">I")
_FRAME_MAX = 16 << 20


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """First message to a worker: all it needs to know. `fds` are inherited descriptors. With a `stage` it computes that
    one of a pipeline, and its vectors are as long as that stage's."""

    model: ModelConfig
    data: DataConfig
    inner: InnerConfig
    tokenizer: str
    directory: str
    device: str
    seed: int
    micro_batch_size: int | None
    outer_fd: int
    delta_fd: int
    inner_state_fd: int
    stage: StageSpec | None = None
    slots_fd: int = -1


class RunInner(msgspec.Struct, frozen=True, tag="inner"):
    """Train on the samples of `ranges` as `orders` say."""

    id: int
    ranges: list[tuple[int, int]]
    first_step: int
    deadline_s: float
    steps: int | None
    orders: InnerRunOptions


class RunEvaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    id: int
    max_batches: int


class RunSample(msgspec.Struct, frozen=True, tag="sample"):
    id: int
    prompt: str
    max_new_tokens: int
    temperature: float
    seed: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End command `id` at its next step, once it has made `after_steps`; means nothing once that command is done. Of
    two for one command the smaller count holds."""

    id: int
    after_steps: int = 0


class InnerResult(msgspec.Struct, frozen=True):
    """What one call of inner_steps did. `sequences` is how many samples of the ranges it consumed, from their start;
    `loss` the mean over the steps in nats a token (NaN without a step); `skipped` counts steps with a NaN or Inf.
    `seconds` went into the steps; `idle_s` is how long the worker had no command since its last inner_steps ended."""

    steps: int
    sequences: int
    tokens: int
    loss: float
    seconds: float
    skipped: int
    idle_s: float = 0.0


class ModelLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The worker is ready. `windows` is the number of samples in one epoch of this machine's corpus; a stage's worker
    reads none."""

    device: str
    bf16: bool
    compiled: bool
    windows: int
    corpus_digest: bytes
    corpus_truncated: bool


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The configuration cannot work here; `message` is fit for the user."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent every second. `ticks` grows with every step or token, so that a stuck worker is told from a busy one."""

    ticks: int


class InnerProgress(msgspec.Struct, frozen=True, tag="progress"):
    """At most two a second; `step` is the run's inner step, `skipped` counts since the command began."""

    step: int
    loss: float
    lr: float
    tokens_per_s: float
    skipped: int


class InnerDone(msgspec.Struct, frozen=True, tag="inner_done"):
    id: int
    result: InnerResult


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    id: int
    nats_per_byte: float


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    id: int
    text: str


Command = RunInner | RunEvaluate | RunSample
ToWorker = LoadModel | Command | StageCommand | Stop
Reply = InnerDone | Evaluated | Sampled | StageReply
FromWorker = ModelLoaded | Rejected | Beat | InnerProgress | Reply

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToWorker | FromWorker) -> bytes:
    """The message as bytes for the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class ControlFrames:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was received; yields every body that is now complete."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > _FRAME_MAX:
                raise ValueError(f"a control frame of {length} bytes: the two ends run different code")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield body
