"""The loss by torch alone, with all logits at once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats a token of logits (B, T, V) for the last T of tokens (B, T+1)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
