"""Adapters (LoRA, arXiv 2106.09685) beside the matrices of a span: each row of a step may have another one, or none.

What a matrix gives is (N, M), its input (N, K). An adapter of rank r adds alpha / r (x A^T) B^T to its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.config import AdapterConfig, ModelConfig
from peer.model.matrices import TensorSource


@dataclass(frozen=True)
class _Pair:
    """A (r, K) and B (M, r), scaled, of one matrix, whose output begins at a column of the fused one."""

    column: int
    down: Tensor
    up: Tensor

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add what it gives for x (n, K) to its columns of out (n, ...), in place."""
        out[:, self.column : self.column + len(self.up)] += ((x.to(self.down.dtype) @ self.down.t()) @ self.up.t()).to(
            out.dtype
        )


@dataclass(frozen=True)
class BlockAdapter:
    """An adapter in one block, by the matrix that it is beside."""

    pairs: Mapping[str, tuple[_Pair, ...]]

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        adapter: AdapterConfig,
        index: int,
        source: TensorSource,
        device: torch.device,
        gains: Mapping[str, Tensor | None],
    ) -> BlockAdapter:
        """`source`: of its tensors by name, in fp32. `gains`: of a fused matrix that has taken the gain of the norm
        before it, which x lacks then."""
        at = f"model.layers.{index - index % config.shared_blocks}."
        found: dict[str, tuple[_Pair, ...]] = {}
        for matrix, layers in _fused(config).items():
            pairs, column = list[_Pair](), 0
            for layer, rows in layers:
                if layer.rpartition(".")[2] in adapter.targets:
                    down = source(f"{at}{layer}.lora_A.weight").float().to(device)
                    up = source(f"{at}{layer}.lora_B.weight").float().to(device)
                    gain = gains.get(matrix)
                    pairs.append(_Pair(column, down if gain is None else down * gain, up * adapter.scaling))
                column += rows
            found[matrix] = tuple(pairs)
        return cls(found)


@dataclass(frozen=True)
class AdaptedRows:
    """The rows of a step that have an adapter: `parts` are slices of rows, with their adapter in the present block."""

    parts: Sequence[tuple[slice, BlockAdapter]] = ()

    def add(self, matrix: str, x: Tensor, out: Tensor) -> Tensor:
        """Add what the adapters give for x (N, K) to what the fused `matrix` has given, out (N, M), and return it."""
        for rows, adapter in self.parts:
            for pair in adapter.pairs[matrix]:
                pair.add_to(out[rows], x[rows])
        return out


def _fused(config: ModelConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return the layers of each fused matrix of a block, with their rows."""
    query, key = config.heads * config.head_size, config.kv_heads * config.head_size
    wide = config.intermediate_size
    return {
        "qkv": (("self_attn.q_proj", query), ("self_attn.k_proj", key), ("self_attn.v_proj", key)),
        "out": (("self_attn.o_proj", config.hidden_size),),
        "gate_up": (("mlp.gate_proj", wide), ("mlp.up_proj", wide)),
        "down": (("mlp.down_proj", config.hidden_size),),
    }
