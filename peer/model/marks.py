"""Tokens that do not count in the loss: a batch (B, T+1) holds such a token as -1 - id.

As an input it is a token like others; as a target it has no loss and no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ids_of(tokens: Tensor) -> Tensor:
    """Return the ids of tokens with marks, of the same shape."""
    return torch.where(tokens < 0, -1 - tokens, tokens)


def counted(tokens: Tensor) -> int:
    """Return how many targets, all tokens (B, T+1) but the first of each sequence, count in the loss."""
    return int((tokens[:, 1:] >= 0).sum())
