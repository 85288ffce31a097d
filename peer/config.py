"""The part of a run's manifest about compute: the model, the data, the inner optimizer.

Plain msgspec structs without torch, so that reading a manifest or printing `--help` costs milliseconds. An invalid
value raises ValueError on construction, which msgspec turns into a ValidationError with the field's path.
"""

from __future__ import annotations

from typing import Literal

import msgspec


def _positive(struct: msgspec.Struct, *names: str) -> None:
    for name in names:
        if getattr(struct, name) <= 0:
            raise ValueError(f"{name} is {getattr(struct, name)}: it must be above 0")


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Llama 3's scaling of the rotary frequencies to contexts longer than in pre-training (arXiv 2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        _positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}: it must be above low_freq_factor, {self.low_freq_factor}"
            )


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder of the Llama family."""

    vocab_size: int = 256
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_seq_len: int
    """The longest context, in tokens."""
    head_dim: int | None = None
    """None: hidden_size / heads."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """An RMSNorm on each head of q and k (Qwen3)."""
    attention_bias: bool = False
    """Biases on q, k and v (Qwen2)."""
    tie_embeddings: bool = True
    shared_blocks: int = 1
    """The number of consecutive blocks that use the parameters of one (ALBERT's groups, arXiv 1909.11942), named after
    the first of them. A pipeline splits between groups only, so that every parameter is in one stage."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size")
        _positive(self, "max_seq_len", "rope_theta", "norm_eps", "shared_blocks")
        if self.layers % self.shared_blocks:
            raise ValueError(f"shared_blocks is {self.shared_blocks}: it must divide layers ({self.layers})")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: it must divide heads ({self.heads})")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(f"heads is {self.heads}: it must divide hidden_size ({self.hidden_size}), or set head_dim")
        if self.head_size <= 0 or self.head_size % 2:
            raise ValueError(f"head_dim is {self.head_size}: rotary embedding needs an even number above 0")
        if self.qk_norm and self.attention_bias:
            raise ValueError("qk_norm and attention_bias exclude each other: no model family has both")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The source of training text: the machine's Python standard library, or a folder of text files."""

    seq_len: int
    source: Literal["stdlib", "folder"] = "stdlib"
    path: str = ""
    """The folder of text files."""
    validation_share: float = 0.05
    max_bytes: int = 256 << 20
    """The limit of what is read into memory; of a larger folder, the whole files that fit."""

    def __post_init__(self) -> None:
        _positive(self, "seq_len", "max_bytes")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share is {self.validation_share}: it must lie between 0 and 1")
        if (self.source == "folder") != bool(self.path):
            raise ValueError('path goes with source = "folder": set both or neither')


class InnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The inner optimizer. Steps are the run's inner steps, not one peer's."""

    lr: float
    batch_size: int
    """Sequences a step."""
    total_steps: int
    optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"] = "adamw"
    """AdamW; "adamw8bit", AdamW with moments of one byte a value, which needs bitsandbytes; Lion (arXiv 2302.06675),
    with a rate 3 to 10 times below AdamW's and betas near (0.9, 0.99); LAMB (1904.00962), for large batches; Muon,
    which orthogonalizes the blocks' matrices and leaves the rest to AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    """Not used by Lion."""
    weight_decay: float = 0.1
    """Of matrices; gains and biases do not decay."""
    clip_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    """ "cosine" warms up linearly over `warmup_steps`, then falls to `min_lr_share * lr` at `total_steps` and stays
    there. "constant" only warms up."""
    min_lr_share: float = 0.1
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """ "auto" is bf16 autocast if the device gains from it, else fp32."""
    compile: bool = False
    momentum: float = 0.95
    """Of Muon, like the two settings below."""
    newton_schulz_steps: int = 5
    muon_scale: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """ "match_rms_adamw" (2502.16982) makes one rate right for both of Muon's parts."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "batch_size", "total_steps", "eps", "clip_norm")
        if not (0.0 <= self.betas[0] < 1.0 and 0.0 <= self.betas[1] < 1.0):
            raise ValueError(f"betas is {list(self.betas)}: both must lie in [0, 1)")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay is {self.weight_decay}: it must not be below 0")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}: it must lie between 0 and total_steps, {self.total_steps}"
            )
        if not 0 <= self.min_lr_share <= 1:
            raise ValueError(f"min_lr_share is {self.min_lr_share}: it must lie between 0 and 1")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum is {self.momentum}: it must lie in [0, 1)")
        if not 1 <= self.newton_schulz_steps <= 20:
            raise ValueError(f"newton_schulz_steps is {self.newton_schulz_steps}: it must lie between 1 and 20")
