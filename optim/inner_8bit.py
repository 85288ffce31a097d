"""AdamW with moments of a byte a value (arXiv 2110.02861), by bitsandbytes, which is imported only when asked for."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from optim.inner import InnerOptimizer, InnerSpec
from peer.errors import ConfigError
from peer.layout import FlatLayout


class AdamW8bit(InnerOptimizer):
    """2 bytes of state a value instead of 8. fp32 vectors only; a vector of under 4096 values keeps fp32 moments."""

    def __init__(self, spec: InnerSpec, layout: FlatLayout, like: torch.Tensor) -> None:
        super().__init__(spec, layout, like)
        if like.dtype != torch.float32:
            raise ConfigError("adamw8bit works on fp32 weights only: choose adamw for others.")
        self._parameter = torch.nn.Parameter(torch.empty_like(like))
        self._optimizer: Any = _bitsandbytes().optim.AdamW8bit(
            [self._parameter], lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
        )

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> None:
        self._parameter.data = theta  # moved in place
        self._parameter.grad = gradient
        self._optimizer.param_groups[0]["lr"] = self.lr
        self._optimizer.step()
        self._parameter.grad = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = self._optimizer.state.get(self._parameter, {})
        return {key: torch.as_tensor(value) for key, value in state.items()}


def _bitsandbytes() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of every machine without a GPU
            return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError('adamw8bit needs bitsandbytes: pip install "barnraise[gpu]".') from None
