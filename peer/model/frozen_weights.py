"""The frozen weights that an adapter is trained beside: fp32 or bf16, or int8 or nf4 (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from peer.config import ModelConfig, StorageConfig
from peer.footprint.parameters import frozen_shapes
from peer.footprint.stored import is_quantized
from peer.ipc.train_messages import LoadBase
from peer.model.matrices import Matrix, load_matrix
from peer.model.parameter_files import ParameterFiles

FrozenWeights = Mapping[str, Tensor | Matrix]
"""The base's parameters by name; quantized ones as matrices."""
_TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_frozen(
    files: ParameterFiles, model: ModelConfig, form: StorageConfig, device: torch.device, blocks: range | None = None
) -> FrozenWeights:
    """Return what is frozen beside the adapter of some blocks (None: of the whole model), on `device`; on a CPU mapped
    from the files, where these have its type. Raises CheckpointError."""

    def stored(name: str) -> Tensor:
        return files.tensor(name).to(device)

    found: dict[str, Tensor | Matrix] = {}
    for name, shape in frozen_shapes(model, blocks):
        if form.quantization is not None and is_quantized(name, shape):
            found[name] = load_matrix(stored, [name], shape[1], form.quantization)
        else:
            found[name] = stored(name).to(_TYPES[form.dtype])
    return found


def open_frozen(
    base: LoadBase | None, model: ModelConfig, device: torch.device, blocks: range | None = None
) -> FrozenWeights | None:
    """As `load_frozen`, from the folders that a worker is told; None where the whole model is trained."""
    if base is None:
        return None
    return load_frozen(ParameterFiles(map(Path, base.folders)), model, base, device, blocks)


def frozen_product(x: Tensor, weight: Tensor | Matrix, bias: Tensor | None = None) -> Tensor:
    """Multiply x (..., K) with frozen weights (M, K), which may be held in fewer bits than x: (..., M). Only x gets a
    gradient."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2).to(dtype)
    out: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    out = out.unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


class _Product(torch.autograd.Function):
    """The product of rows (N, K) with a matrix of another type. For the backward pass the matrix is decoded once more,
    so that no copy of it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor | Matrix) -> Tensor:
        ctx.matrix = matrix.detach() if isinstance(matrix, Tensor) else matrix
        return F.linear(x, matrix.to(x.dtype)) if isinstance(matrix, Tensor) else matrix.times(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        matrix = ctx.matrix
        dense = matrix.to(gradient.dtype) if isinstance(matrix, Tensor) else matrix.dense(gradient.dtype)
        return gradient @ dense, None
