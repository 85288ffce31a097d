"""Types that the network process and a stage's worker share: the stage, its micro-batches, and the results of changes.

Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.bounds import Count, Number, Text
from peer.config import ModelConfig
from peer.errors import ConfigError
from peer.ipc.span import Span


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stage `index` of a pipeline: the blocks `span`, and limits on what the stage holds."""

    span: Span
    index: int
    max_tokens: int
    """The largest micro-batch, sequences times length; shared memory is sized by it."""
    slots: int = 8
    """The micro-batches that may lie in shared memory at once, in either direction."""
    held_max: int = 64
    """The micro-batches that may wait for their backward. Beyond it a forward is refused ("full"); nothing is
    dropped."""
    held_max_bytes: int = 4 << 30
    """The bytes of activations that may wait for a backward. Beyond it a forward is refused ("full")."""
    recompute: bool = False
    """Keep only the input of a micro-batch and repeat the forward in its backward. A micro-batch whose activations
    alone exceed `held_max_bytes` is always treated so."""
    staleness: int = 0
    """The epochs that a micro-batch may be away from the stage's own, in either direction."""
    previous: bool = False
    """Keep the weights of the epoch before, for micro-batches of that epoch that do not count."""
    marked: bool = False
    """Whether only some targets count in the loss; the others are -1 - id (`peer.model.marks`)."""

    def __post_init__(self) -> None:
        if self.index < 0 or (self.index == 0) != self.span.is_first:
            raise ValueError(f"index is {self.index} for the blocks {self.span}: number the stages from 0")
        for name in ("max_tokens", "slots", "held_max", "held_max_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}: it must be 0 or more")

    @property
    def is_first(self) -> bool:
        """Whether the stage takes token ids."""
        return self.span.is_first

    @property
    def is_last(self) -> bool:
        """Whether the stage returns losses."""
        return self.span.is_last

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError if `model` cannot be split like this."""
        if self.span.of != model.layers:
            raise ConfigError(f"the stages hold {self.span.of} blocks and the model {model.layers}: split it again")
        if self.span.count < model.layers and model.tie_embeddings and model.adapter is None:
            raise ConfigError("a pipeline's head is a parameter of its own: set model.tie_embeddings = false")
        for cut in (self.span.first, self.span.end):
            if cut % model.shared_blocks:
                raise ConfigError(
                    f"a stage begins or ends at block {cut}, inside a group that shares its parameters: cut at "
                    f"multiples of model.shared_blocks ({model.shared_blocks})"
                )


PassKey = tuple[str, int]
"""The id and the attempt of a pass."""


class MicroBatch(msgspec.Struct, frozen=True):
    """One pass of a micro-batch through `stage`."""

    id: str
    """The same on all stages."""
    stage: int
    epoch: int
    """The epoch of the weights that the micro-batch is for."""
    count: bool = True
    """Add the gradient to the stage's, once: an id is refused ("duplicate") while its gradient is part of what the
    stage has learned since its weights were imported. A micro-batch that does not count may pass any number of
    times."""
    attempt: int = 0
    """Several passes of one id may be under way at a time, each with its own number."""
    targets: int | None = None
    """How many of its targets count in the loss; None: all."""
    sample: int = 0
    """The number of the sample in its first row, which those in the others follow: it keys what dropout drops."""

    @property
    def key(self) -> PassKey:
        """Tells this pass from other passes of the same id."""
        return (self.id, self.attempt)


Ids = Annotated[tuple[Text, ...], msgspec.Meta(max_length=1 << 20)]


TAKEN_NORM_MAX: Final = 1e38  # nearly the largest fp32


class Taken(msgspec.Struct, frozen=True):
    """The content of a gradient."""

    micro_batches: Ids
    """The ids counted in it, in the order of their backwards."""
    tokens: Number
    norm: Annotated[float, msgspec.Meta(ge=0, le=TAKEN_NORM_MAX)]
    """The norm of the mean gradient, of this stage's parameters alone."""


class Moved(msgspec.Struct, frozen=True):
    """A change of the weights."""

    epoch: Count
    micro_batches: Ids = ()
    """The ids counted in the step."""
    expired: Ids = ()
    """The ids held without a backward, and too far from the new epoch: dropped."""
    uncounted: Ids = ()
    """The ids of a gradient sum that was thrown away, because one of them was too far from the new epoch."""
