"""What the network process and a stage's worker say to each other, beside `peer.ipc.messages`.

Tensors lie in shared memory: micro-batches in numbered slots (`peer.ipc.stage_slots`), weights in `outer`, gradients
and products in `delta`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from peer.errors import StageReason
from peer.ipc.stage_spec import MicroBatch, Moved, PassKey, Taken


class RunForward(msgspec.Struct, frozen=True, tag="stage_forward"):
    """Of `batch` sequences of `length` tokens in `slot`; the answer is written over them."""

    id: int
    micro_batch: MicroBatch
    slot: int
    batch: int
    length: int
    keep: bool


class RunBackward(msgspec.Struct, frozen=True, tag="stage_backward"):
    """By the gradient in `slot`; that of the stage's input is written over it."""

    id: int
    micro_batch: MicroBatch
    slot: int
    batch: int
    length: int


class DropMicroBatch(msgspec.Struct, frozen=True, tag="stage_drop"):
    """Let go of what is held of this pass, and refuse ("cancelled") what waits to be computed. Overtakes everything."""

    id: int
    key: PassKey


class TakeGradient(msgspec.Struct, frozen=True, tag="stage_take"):
    """The mean gradient into delta; and `forget` it."""

    id: int
    forget: bool


class RunStep(msgspec.Struct, frozen=True, tag="stage_step"):
    """`merged`: by the gradient that lies in delta, not by the stage's own."""

    id: int
    step: int
    merged: bool
    norm: float | None
    epoch: int | None


class ImportWeights(msgspec.Struct, frozen=True, tag="stage_import"):
    """From outer; `rebase`: with what was learned since the last capture on top."""

    id: int
    epoch: int
    rebase: bool


class ExportProduct(msgspec.Struct, frozen=True, tag="stage_export"):
    """Outer minus local, or the local weights, into delta; and the inner optimizer's state into its own place.
    `capture`: remember the local weights for an import that rebases."""

    id: int
    product: Literal["delta", "weights"]
    capture: bool


class MicroBatchDone(msgspec.Struct, frozen=True, tag="stage_done"):
    """`loss`: of the last stage's forward, the mean in nats a token. `seconds` the device took, without waiting.
    `counted`: this was a backward, and its gradient is in the stage's."""

    id: int
    seconds: float
    loss: float | None = None
    counted: bool = False


class DropDone(msgspec.Struct, frozen=True, tag="stage_dropped"):
    """`found`: whether there was anything of it, held or waiting."""

    id: int
    found: bool


class TakeDone(msgspec.Struct, frozen=True, tag="stage_taken"):
    id: int
    taken: Taken


class MoveDone(msgspec.Struct, frozen=True, tag="stage_moved"):
    id: int
    moved: Moved


class ExportDone(msgspec.Struct, frozen=True, tag="stage_exported"):
    id: int


class Refusal(msgspec.Struct, frozen=True, tag="stage_refused"):
    """A StageRefused on its way to the parent."""

    id: int
    message: str
    reason: StageReason


StageCommand = RunForward | RunBackward | DropMicroBatch | TakeGradient | RunStep | ImportWeights | ExportProduct
StageReply = MicroBatchDone | DropDone | TakeDone | MoveDone | ExportDone | Refusal
