"""What the run's manifest says about compute: the model, the data, the inner optimizer.

Plain msgspec structs without torch, so that reading a manifest or printing `--help` costs milliseconds. A value that
makes no sense raises ValueError on construction (msgspec turns it into a ValidationError that names the field's path).
"""

from __future__ import annotations

from typing import Literal

import msgspec


def _positive(struct: msgspec.Struct, *names: str) -> None:
    for name in names:
        if getattr(struct, name) <= 0:
            raise ValueError(f"{name} is {getattr(struct, name)}: it must be above 0")


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Llama 3's stretching of the rotary frequencies to contexts longer than the pre-training's (arXiv 2407.21783)."""

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
    """A decoder of the Llama family. `attention_bias` puts biases on q, k and v (Qwen2), `qk_norm` an RMSNorm on each
    head of q and k (Qwen3). `max_seq_len` is the longest context, in tokens.

    `shared_blocks`: so many consecutive blocks use the parameters of one (ALBERT's groups, arXiv 1909.11942); they are
    named after the first of them. A pipeline cuts between groups only, so that every parameter lives in one stage.
    """

    vocab_size: int = 256
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_seq_len: int
    head_dim: int | None = None  # None: hidden_size / heads
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    tie_embeddings: bool = True
    shared_blocks: int = 1

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
    """Where training text comes from: the Python standard library of the machine, or `path`, a folder of text files.

    `max_bytes` bounds what is read into memory; a larger folder is cut after that many bytes, whole files at a time.
    """

    seq_len: int
    source: Literal["stdlib", "folder"] = "stdlib"
    path: str = ""
    validation_share: float = 0.05
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        _positive(self, "seq_len", "max_bytes")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share is {self.validation_share}: it must lie between 0 and 1")
        if (self.source == "folder") != bool(self.path):
            raise ValueError('path goes with source = "folder": set both or neither')


class InnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The inner optimizer. `batch_size` counts sequences a step; steps are the run's inner steps, not one peer's.

    `schedule` "cosine" warms up linearly over `warmup_steps`, then falls to `min_lr_share * lr` at `total_steps` and
    stays there; "constant" only warms up. `dtype` "auto" is bf16 autocast where the device has it, else fp32.

    `optimizer`: AdamW; "adamw8bit", AdamW with moments of a byte a value, needs bitsandbytes; Lion (arXiv 2302.06675)
    wants a rate 3 to 10 times below AdamW's and betas near (0.9, 0.99); LAMB (1904.00962) is for large batches; Muon
    orthogonalizes the blocks' matrices with `momentum` and `newton_schulz_steps`, and gives the rest to AdamW at the
    same rate, which `muon_scale` "match_rms_adamw" (2502.16982) makes right for both. `weight_decay` is for matrices,
    not for gains and biases. `eps` means nothing to Lion, `momentum` and what follows only to Muon.
    """

    lr: float
    batch_size: int
    total_steps: int
    optimizer: Literal["adamw", "adamw8bit", "lion", "lamb", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr_share: float = 0.1
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    compile: bool = False
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    muon_scale: Literal["original", "match_rms_adamw"] = "match_rms_adamw"

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
