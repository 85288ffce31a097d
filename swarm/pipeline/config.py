"""What a run's manifest fixes about its micro-batches, and what a peer knows of another's load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Activations = Literal["int8", "int4", "fp16", "none"]
STALENESS: Final = 1  # epochs that the weights of two stages may be apart


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """`groups[s]`: the id of stage s's group. A micro-batch is `micro_batch` sequences of `seq_len` tokens, its hidden
    state (micro_batch, seq_len, hidden_size), coded as `activations`.

    `synchronous`: weights change at commits only and a round's batch is `round_samples` samples; else replicas make
    steps of their own between commits, and `round_samples` is 0.

    `hold_s`: how long a replica keeps a call whose epoch it has not reached. `places`: how many micro-batches it has
    under way at once. `window_max`: how many an issuer has.
    """

    run_id: str
    groups: tuple[str, ...]
    micro_batch: int
    seq_len: int
    hidden_size: int
    vocab_size: int
    activations: Activations = "int8"
    synchronous: bool = False
    round_samples: int = 0
    hold_s: float = 20.0
    places: int = 48
    window_max: int = 32

    @property
    def stages(self) -> int:
        return len(self.groups)

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.micro_batch * self.seq_len


@dataclass(frozen=True)
class LoadReport:
    """What a replica's record says: micro-batches that wait there, its seconds for one, and `at`, when it was written
    (its own clock; only compared with other records of the same peer)."""

    queue: float = 0.0
    service_s: float = 0.0
    at: float = 0.0
