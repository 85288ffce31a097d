"""The matrices of blocks: as they are, or in int8 or nf4 by bitsandbytes' kernels.

A matrix is (M, K), its input (N, K), its product (N, M).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.config import Quantization
from peer.footprint.stored import NF4_BLOCK, scales_name
from peer.model.quantize import bitsandbytes

FEW_ROWS: Final = 6
_INT8_MAX: Final = 127

TensorSource = Callable[[str], Tensor]
"""Returns a stored tensor by its name (`peer.footprint.stored`)."""


class Matrix(Protocol):
    """A matrix of a block."""

    def times(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        """Multiply x (N, K) with the matrix, and add base (N, M): (N, M) in the type of x."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (M, K) in that type."""
        ...


@dataclass(frozen=True)
class PlainMatrix:
    """A matrix in the type to compute in."""

    weight: Tensor

    def times(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        """With few rows a CPU's library is up to twice as fast if they are columns, and in fp32 two of them up to twice
        as fast as one (benchmarks/serving/inference.py --local)."""
        if len(x) > FEW_ROWS or x.device.type != "cpu":
            product = F.linear(x, self.weight)
            return product if base is None else base + product
        columns = torch.cat((x, x)) if len(x) == 1 and x.dtype == torch.float32 else x
        product = torch.mm(self.weight, columns.t()).t()[: len(x)]
        return product.contiguous() if base is None else base + product

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


class Int8Matrix:
    """A matrix in int8, whose input is rounded to int8 row by row: LLM.int8() (arXiv 2208.07339) without its outliers,
    whose columns would depend on the other rows of a step."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """`codes`: (M, K) int8; `scales`: (M,) fp32."""
        self._functional: Any = bitsandbytes("a model in int8").functional
        self._codes, self._scales = codes, scales

    def times(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        codes, scales, _ = self._functional.int8_vectorwise_quant(x.half())
        product: Tensor = torch.ops.bitsandbytes.int8_scaled_mm(codes, self._codes, scales, self._scales, dtype=x.dtype)
        return product if base is None else base + product

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._codes.shape
        return rows, columns

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self._codes * (self._scales / _INT8_MAX).unsqueeze(1)).to(dtype)


class Nf4Matrix:
    """A matrix in nf4 (arXiv 2305.14314). A CPU decodes all of it for each product."""

    def __init__(self, codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        """`codes`: (M K / 2, 1) uint8; `scales`: (M K / NF4_BLOCK,) fp32; `shape`: (M, K)."""
        self._library: Any = bitsandbytes("a model in nf4")
        self._codes, self._scales, self.shape = codes, scales, shape

    def times(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        if x.device.type == "cpu":
            return PlainMatrix(self.dense(x.dtype)).times(x, base)
        product: Tensor = self._library.matmul_4bit(x, self._codes.t(), self._state(x.dtype))
        return product if base is None else base + product

    def dense(self, dtype: torch.dtype) -> Tensor:
        found: Tensor = self._library.functional.dequantize_4bit(self._codes, self._state(dtype))
        return found

    def _state(self, dtype: torch.dtype) -> Any:
        return self._library.functional.QuantState(
            absmax=self._scales,
            shape=torch.Size(self.shape),
            dtype=dtype,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
        )


def load_matrix(source: TensorSource, names: Sequence[str], columns: int, quantization: Quantization | None) -> Matrix:
    """Return parameters of `columns` each, one below the other, as one matrix."""
    stored = _joined([source(name) for name in names])
    if quantization is None:
        return PlainMatrix(stored)
    scales = _joined([source(scales_name(name, quantization)) for name in names])
    if quantization == "int8":
        return Int8Matrix(stored, scales)
    return Nf4Matrix(stored, scales, (2 * stored.numel() // columns, columns))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one below the other; a single one as it is, which takes no second copy of it."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
