"""The micro-batch settings that follow from a run's manifest, and the load that a replica reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Activations = Literal["int8", "int4", "fp16", "none"]
STALENESS: Final = 1  # epochs that the weights of two stages may be apart


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Settings shared by all replicas of a pipeline, derived from the manifest."""

    run_id: str
    groups: tuple[str, ...]
    """The group id of each stage."""
    micro_batch: int
    """Sequences in a micro-batch. Its hidden state is (micro_batch, seq_len, hidden_size)."""
    seq_len: int
    hidden_size: int
    vocab_size: int
    marked: bool = False
    """Whether only some tokens count in the loss (`peer.model.marks`)."""
    activations: Activations = "int8"
    """The code of hidden states and their gradients on the wire."""
    synchronous: bool = False
    """Weights change at commits only. Otherwise replicas make inner steps between commits."""
    round_samples: int = 0
    """Samples in the batch of a synchronous round; 0 where rounds are not synchronous."""
    hold_s: float = 20.0
    """How long a replica holds a call of an epoch that it has not reached."""
    max_concurrent: int = 48
    """Micro-batches that a replica handles at once."""
    window_max: int = 32
    """Micro-batches that a replica of stage 0 has in flight."""

    @property
    def stages(self) -> int:
        return len(self.groups)

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.micro_batch * self.seq_len


@dataclass(frozen=True)
class LoadReport:
    """The load in a replica's record."""

    queue: float = 0.0
    """Micro-batches that wait."""
    service_s: float = 0.0
    """Seconds of device and coding for one micro-batch."""
    at: float = 0.0
    """When the record was written, by its author's clock. Comparable with other records of the same peer only."""


ReplicasOf = Callable[[int], Mapping[str, LoadReport]]
"""Returns the live replicas of a stage by peer id, this peer included or not. Called for each micro-batch."""
