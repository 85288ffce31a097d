"""The settings of `benchmarks/pipelines/swarm.py`: two models, their cuts, and their micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from peer.config import DataConfig, InnerConfig, ModelConfig
from swarm.pipeline.config import Activations
from swarm.placement.costs import PartCost, split_layers

SEED: Final = 0
HIDDEN_SIZE: Final = 1024
VOCAB_SIZE: Final = 256
BITS: Final[dict[Activations, int]] = {"none": 32, "fp16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Setting:
    """A kind of model and what goes between its stages; micro-batches of `sequences` times `seq_len` tokens. `blocks`:
    None for one a stage."""

    name: str
    activations: Activations
    blocks: int | None
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    sequences: int = 2
    seq_len: int = 256

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch."""
        return self.sequences * self.seq_len

    @property
    def ideal_bytes(self) -> float:
        """Bytes of the hidden state's values for a token, hop and direction, without scales, ids and headers."""
        return HIDDEN_SIZE * BITS[self.activations] / 8

    def model(self, stages: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            layers=self.blocks or stages,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_seq_len=self.seq_len,
            tie_embeddings=False,
        )

    def cuts(self, stages: int) -> tuple[tuple[int, int], ...]:
        """Return the blocks of each stage; with so small a vocabulary, the embedding and the head cost next to
        nothing."""
        return split_layers([PartCost(1.0)] * self.model(stages).layers, stages)

    @property
    def data(self) -> DataConfig:
        return DataConfig(seq_len=self.seq_len)

    @property
    def inner(self) -> InnerConfig:
        return InnerConfig(lr=1e-3, batch_size=self.sequences, total_steps=1000, dtype="fp32")


DENSE: Final = Setting("dense", "int8", 4, heads=16, kv_heads=4, head_dim=64, intermediate_size=2816)
"""Blocks as they are in models of this width."""
THIN: Final = Setting("thin", "none", None, heads=1, kv_heads=1, head_dim=16, intermediate_size=16)
"""A block a stage with nearly no arithmetic, hidden states sent in fp32: so that a link, and not our cores, can be the
limit, as it is where stages have fast devices."""
SETTINGS: Final = {setting.name: setting for setting in (DENSE, THIN)}


def some_tokens(setting: Setting, generator: torch.Generator) -> torch.Tensor:
    """Return a micro-batch (B, T+1) int64; the ids make no difference to the time."""
    return torch.randint(0, VOCAB_SIZE, (setting.sequences, setting.seq_len + 1), generator=generator)
