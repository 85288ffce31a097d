"""Checks of a stage's input. Each check raises StageRefused, with the reason, before anything is computed.

Shapes: B sequences, T tokens, C hidden_size.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from peer.config import ModelConfig
from peer.errors import StageReason, StageRefused
from peer.ipc.stage_spec import StageSpec
from peer.model.marks import ids_of
from peer.model.mixed_precision import LossScaler, PassScale

NORM_MAX: Final = 1e18
"""The limit for the norm of an input: far above the norms of hidden states and their gradients, even in diverged
models, and low enough that no product of the two overflows. So the large gradients of weights need no check of every
value."""


def check_input(spec: StageSpec, model: ModelConfig, x: Tensor, targets: Tensor | None) -> None:
    """Check `x`, token ids (B, T) int64 on the first stage, else the hidden state (B, T, C) fp32, and `targets`, (B, T)
    int64 on the last stage, else None."""
    if spec.is_first:
        _require(x.dtype == torch.int64, f"token ids are int64, not {x.dtype}", "dtype")
        _require(x.dim() == 2, f"token ids have the shape (B, T), not {tuple(x.shape)}", "shape")
    else:
        _require(x.dtype == torch.float32, f"a hidden state is float32, not {x.dtype}", "dtype")
        fits = x.dim() == 3 and x.shape[2] == model.hidden_size
        _require(fits, f"a hidden state has the shape (B, T, {model.hidden_size}), not {tuple(x.shape)}", "shape")
    check_size(spec, model, *x.shape[:2])
    _require((targets is not None) == spec.is_last, "targets go to the last stage only, which needs them", "shape")
    if targets is not None:
        _require(targets.dtype == torch.int64, f"targets are int64, not {targets.dtype}", "dtype")
        _require(targets.shape == x.shape[:2], f"targets {tuple(targets.shape)} for {tuple(x.shape[:2])}", "shape")
        _check_ids(model, ids_of(targets) if spec.marked else targets)
    if spec.is_first:
        _check_ids(model, x)
    else:
        _require_sane(x, "the hidden state")


def check_size(spec: StageSpec, model: ModelConfig, batch: int, length: int) -> None:
    """Check the size of a micro-batch: `batch` sequences of `length` tokens."""
    sized = batch > 0 and 0 < length <= model.max_seq_len and batch * length <= spec.max_tokens
    limits = f"{spec.max_tokens} tokens, of sequences up to {model.max_seq_len}"
    _require(sized, f"a micro-batch of {batch} x {length} tokens: a stage takes 1 to {limits}", "shape")


def check_gradient(spec: StageSpec, model: ModelConfig, shape: torch.Size, gradient: Tensor | None) -> None:
    """Check the gradient of the output for a micro-batch of `shape` (B, T): (B, T, C) fp32, None on the last stage."""
    if spec.is_last:
        _require(gradient is None, "the last stage's gradient begins with its loss: send none", "shape")
        return
    if gradient is None:
        raise StageRefused("a stage before the last needs the gradient of its output", "shape")
    _require(gradient.dtype == torch.float32, f"a gradient is float32, not {gradient.dtype}", "dtype")
    wanted = (*shape, model.hidden_size)
    _require(gradient.shape == wanted, f"the gradient has the shape {tuple(gradient.shape)}, not {wanted}", "shape")
    _require_sane(gradient, "the gradient")


def pass_scale(scaler: LossScaler | None, gradient: Tensor | None, tokens: int) -> PassScale | None:
    """Return the scale that a backward of so many tokens begins with, from the gradient of the output (B, T, C) or
    (None) from the loss; None unless in fp16. All ranks have the whole gradient, and so the same scale. Raises
    StageRefused ("not_finite") if none is small enough."""
    if scaler is None:
        return None
    if gradient is None:
        return PassScale(scaler, None)
    largest = float(torch.linalg.vector_norm(gradient, math.inf))
    tried = PassScale(scaler, largest / tokens)
    if tried.overflows:
        raise StageRefused(
            f"the gradient has a value of {largest:.1e}, too large for fp16 at any scale: send another gradient",
            "not_finite",
        )
    return tried


def require_finite(tensor: Tensor, name: str) -> float:
    """Return the norm, which is not finite if a value is not: one pass finds both."""
    return require_finite_norm(float(tensor.norm()), name)


def require_finite_norm(norm: float, name: str) -> float:
    """Return the norm of what is called `name` if it is finite."""
    _require(math.isfinite(norm), f"{name} holds NaN or Inf, or its norm overflows", "not_finite")
    return norm


def _require_sane(tensor: Tensor, name: str) -> None:
    norm = require_finite(tensor, name)
    _require(norm <= NORM_MAX, f"{name} has a norm of {norm:.1e}, above {NORM_MAX:.0e}", "not_finite")


def _check_ids(model: ModelConfig, ids: Tensor) -> None:
    low, high = (int(bound) for bound in ids.aminmax())
    _require(
        low >= 0 and high < model.vocab_size, f"token ids lie in [0, {model.vocab_size}), not {low, high}", "value"
    )


def _require(holds: bool, message: str, reason: StageReason) -> None:
    if not holds:
        raise StageRefused(message, reason)
