"""Messages of the "stage" program, which holds one stage of a pipeline: the first one, commands, and results.

Micro-batches lie in numbered slots of shared memory (`peer.ipc.stage_slots`), weights in `outer`, gradients and
products in `delta`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from peer.bounds import Loss, Seconds
from peer.config import InnerConfig, ModelConfig
from peer.footprint.layout import Compute, Layout
from peer.ipc.messages import Command, VectorFds
from peer.ipc.stage_spec import MicroBatch, PassKey, StageSpec
from peer.ipc.train_messages import LoadBase


class LoadStage(msgspec.Struct, frozen=True, tag="load_stage", kw_only=True):
    """The first message to a worker that computes a stage."""

    rank: int
    """The worker's number in its group, from 0."""
    layout: Layout
    """How the ranks share the stage."""
    meeting: str
    """A file in `directory` at which they meet, by a name that no group has used before."""
    run: str
    """Names the run: its inner optimizer's state is no other's."""
    model: ModelConfig
    inner: InnerConfig
    stage: StageSpec
    compute: Compute
    directory: str
    """The one folder that the worker may write."""
    vectors: VectorFds
    """Of this stage's part of the model."""
    slots_fd: int
    """The inherited descriptor of the slots."""
    base: LoadBase | None = None
    """Of a model with an adapter."""


class _PassCommand(Command, frozen=True):
    micro_batch: MicroBatch
    slot: int
    batch: int
    length: int


class RunForward(_PassCommand, frozen=True, tag="stage_forward"):
    """Compute the `batch` sequences of `length` tokens in `slot`; the output is written over them. The result is a
    MicroBatchDone."""

    keep: bool


class RunBackward(_PassCommand, frozen=True, tag="stage_backward"):
    """Propagate the gradient in `slot`; the gradient of the stage's input is written over it. The result is a
    MicroBatchDone."""


class DropMicroBatch(Command, frozen=True, tag="stage_drop"):
    """Drop the data held for this pass, and refuse ("cancelled") its waiting commands. Overtakes all other commands.
    The result: whether anything was held or waiting."""

    key: PassKey


class TakeGradient(Command, frozen=True, tag="stage_take"):
    """Write the mean gradient to delta, and clear the sum if `clear` is set. The result is a Taken."""

    clear: bool


class RunStep(Command, frozen=True, tag="stage_step"):
    """Make an inner step by the stage's own gradient. The result is a Moved."""

    step: int


class ImportWeights(Command, frozen=True, tag="stage_import"):
    """Take the weights in outer as those of `epoch`. The result is a Moved."""

    epoch: int
    rebase: bool
    """Add what was learned since the last capture."""


class ExportProduct(Command, frozen=True, tag="stage_export"):
    """Write outer - local, or the local weights, to delta. The result is None."""

    product: Literal["delta", "weights"]
    capture: bool
    """Remember the local weights for an import that rebases."""


class MicroBatchDone(msgspec.Struct, frozen=True):
    """The result of a forward or a backward."""

    seconds: Seconds
    """The time that the device took, without waiting."""
    loss: Loss | None = None
    """Of the last stage's forward: the mean in nats a token."""
    counted: bool = False
    """This was a backward, and its gradient is in the stage's sum."""
    overflows: int = 0
    """How often the backward was repeated in fp16, at a smaller scale of the loss."""


StageCommand = RunForward | RunBackward | DropMicroBatch | TakeGradient | RunStep | ImportWeights | ExportProduct
