"""Messages of the "train" program, which holds a whole model: the first one, commands, and results."""

from __future__ import annotations

import msgspec

from peer.bounds import Number, Seconds
from peer.config import InnerConfig, ModelConfig, StorageConfig
from peer.footprint.layout import Compute, Layout
from peer.footprint.step_size import StepSize
from peer.ipc.corpus_messages import LoadCorpus
from peer.ipc.inner_options import InnerRunOptions
from peer.ipc.messages import Command, VectorFds


class LoadBase(StorageConfig, frozen=True, kw_only=True):
    """The frozen weights that an adapter is trained beside: their form, and where they are."""

    folders: tuple[str, ...]
    """The first that has a parameter counts."""


class LoadTrain(msgspec.Struct, frozen=True, tag="load_train", kw_only=True):
    """The first message to a worker that trains a whole model."""

    rank: int
    """The worker's number in its group, from 0."""
    layout: Layout
    """How the workers of the group share the model."""
    meeting: str
    """The file in the worker's folder at which several workers meet; another one for each start of a group."""
    run: str
    """Names the run: its inner optimizer's state is no other's."""
    model: ModelConfig
    inner: InnerConfig
    corpus: LoadCorpus
    """The text, and the one folder that the worker may write."""
    compute: Compute
    step_size: StepSize
    """Where nothing better is known: on one GPU the worker measures what fits."""
    seed: int
    vectors: VectorFds
    base: LoadBase | None = None
    """Of a model with an adapter."""


class RunInner(Command, frozen=True, tag="inner"):
    """Train on the samples of the half-open `ranges`. The result is an InnerResult."""

    ranges: list[tuple[int, int]]
    first_step: int
    deadline_s: float
    steps: int | None
    options: InnerRunOptions


class RunEvaluate(Command, frozen=True, tag="evaluate"):
    """Evaluate the outer weights on held-out text. The result is the loss in nats a byte."""

    max_batches: int


class RunEvaluateDelta(Command, frozen=True, tag="evaluate_delta"):
    """Evaluate the weights in `delta` on held-out text. The result is a list of losses in nats a token, of one batch
    each."""

    max_batches: int


class InnerResult(msgspec.Struct, frozen=True):
    """The outcome of one inner run."""

    steps: Number
    sequences: Number
    """The samples consumed, from the start of the ranges."""
    tokens: Number
    loss: float
    """The mean over the steps in nats a token; NaN without a step."""
    seconds: Seconds
    """The time spent in steps."""
    skipped: Number
    """The steps that were skipped for a NaN or Inf."""
    idle_s: Seconds = 0.0
    """The time without a command since the worker's last inner run ended."""
    overflows: Number = 0
    """The steps that were skipped because a value was beyond fp16 at the scale of the loss, which is smaller since."""


TrainCommand = RunInner | RunEvaluate | RunEvaluateDelta
