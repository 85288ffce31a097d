"""The rotary embedding (RoFormer, arXiv 2104.09864) and its scalings to contexts longer than in pre-training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peer.config import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for each position and pair of head dimensions, (max_seq_len, D/2) fp32 on the CPU."""
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), rotary_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return cos, sin
    times = 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor
    return cos * times, sin * times


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Return the radians a token for each pair of head dimensions, (D/2,) fp32."""
    dim = config.head_size
    frequencies = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":  # within its original context
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    stays = _llama3_blend(scaling, frequencies) if scaling.kind == "llama3" else _yarn_blend(scaling, config)
    return stays * frequencies + (1 - stays) * frequencies / scaling.factor


def _llama3_blend(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Return 1 for short wavelengths, which stay, 0 for long ones, which are slowed, and what is between."""
    slow, fast, longest = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_seq_len
    assert slow is not None and fast is not None and longest is not None
    cycles = longest * frequencies / (2 * math.pi)
    return ((cycles - slow) / (fast - slow)).clamp(0.0, 1.0)


def _yarn_blend(scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Return what `_llama3_blend` does. The ramp is linear in the pair's index, as in transformers."""
    assert scaling.original_max_seq_len is not None
    dim, longest = config.head_size, scaling.original_max_seq_len

    def pair_of(turns: float) -> float:
        return dim * math.log(longest / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as in transformers
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)
