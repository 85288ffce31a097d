"""What a stage of the model is told: which blocks it holds, how much it may hold back, which micro-batch is meant.

Without torch: the network process reads and sends these.
"""

from __future__ import annotations

import msgspec

from peer.config import ModelConfig
from peer.errors import ConfigError


class StageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stage `index` of the pipeline whose stages hold the blocks `stages`, each (first, past the last), in order.

    `max_tokens`: the largest micro-batch, sequences times length; shared memory is sized by it. `slots`: how many
    micro-batches may lie in that memory at once, in either direction. `held_max` micro-batches and `held_max_bytes` of
    activations may wait for their backward; beyond that a forward is refused ("full"), nothing is dropped for it.
    `recompute`: keep only a micro-batch's input and compute the rest anew in its backward, as is done in any case with
    one whose activations alone are more than `held_max_bytes`.
    `staleness`: how many epochs a micro-batch may be away from the stage's own, either way (0: none).
    `previous`: keep the weights of the epoch before, too, for micro-batches of that epoch that are not to be counted.
    """

    stages: tuple[tuple[int, int], ...]
    index: int
    max_tokens: int
    slots: int = 8
    held_max: int = 64
    held_max_bytes: int = 4 << 30
    recompute: bool = False
    staleness: int = 0
    previous: bool = False

    def __post_init__(self) -> None:
        bounds = [0, *(bound for stage in self.stages for bound in stage)]
        if not self.stages or any(a != b for a, b in zip(bounds[::2], bounds[1::2], strict=False)):
            raise ValueError(f"stages is {list(self.stages)}: they must follow each other from block 0 without gaps")
        if any(not first < end for first, end in self.stages):
            raise ValueError(f"stages is {list(self.stages)}: each needs a block")
        if not 0 <= self.index < len(self.stages):
            raise ValueError(f"index is {self.index}: there are stages 0 to {len(self.stages) - 1}")
        for name in ("max_tokens", "slots", "held_max", "held_max_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.staleness < 0:
            raise ValueError(f"staleness is {self.staleness}: it must be 0 or more")

    @property
    def layers(self) -> range:
        """The blocks of this stage."""
        return range(*self.stages[self.index])

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns losses."""
        return self.index == len(self.stages) - 1

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError where `model` cannot be cut like this."""
        cuts = [end for _, end in self.stages]
        if cuts[-1] != model.layers:
            raise ConfigError(f"the stages hold {cuts[-1]} blocks and the model {model.layers}: split it anew")
        if len(self.stages) > 1 and model.tie_embeddings:
            raise ConfigError("a pipeline's head is a parameter of its own: set model.tie_embeddings = false")
        for cut in cuts:
            if cut % model.shared_blocks:
                raise ConfigError(
                    f"a stage ends at block {cut} within a group that shares its parameters: cut at multiples of "
                    f"model.shared_blocks ({model.shared_blocks})"
                )


PassKey = tuple[str, int]


class MicroBatch(msgspec.Struct, frozen=True):
    """A micro-batch on its way through `stage`: `id` is the same on all stages, `epoch` that of the weights it is for.

    With `count` its gradient is added to the stage's, once: an id is refused ("duplicate") while it is in what the
    stage has learned since its weights were imported. Without, it only passes through, any number of times. Several
    passes of one id may be under way at a time, each under an `attempt` number of its own.
    """

    id: str
    stage: int
    epoch: int
    count: bool = True
    attempt: int = 0

    @property
    def key(self) -> PassKey:
        """Tells this pass through the stage from others of the same id."""
        return (self.id, self.attempt)


class Taken(msgspec.Struct, frozen=True):
    """What a gradient is made of: the micro-batches counted in it, in the order of their backwards, their tokens, and
    the norm of the mean gradient (of this stage's parameters alone)."""

    micro_batches: tuple[str, ...]
    tokens: int
    norm: float


class Moved(msgspec.Struct, frozen=True):
    """The weights have changed. `micro_batches` were counted in the step. Too far from the new epoch were: `expired`,
    held without a backward, and `uncounted`, whose gradients had been gathered and are thrown away: the whole sum, if
    one of them was."""

    epoch: int
    micro_batches: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
