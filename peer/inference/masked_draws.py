"""Drawing under masks: the row of a position and its mask come in any order; the token is drawn once both are there.

The forward pass does not wait for a mask, and no other session does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class MaskedDraws:
    """Of one session: the last mask, and the logits that wait for theirs."""

    def __init__(self) -> None:
        self._mask: tuple[int, Tensor] | None = None
        self._waiting: tuple[int, Tensor] | None = None

    def give(self, position: int, mask: Tensor) -> Tensor | None:
        """Take the mask (V,) bool of a position; an earlier one is forgotten. Return the logits (V,) that waited for
        it."""
        self._mask = position, mask
        if self._waiting is None or self._waiting[0] != position:
            return None
        (_, logits), self._waiting = self._waiting, None
        return logits

    def mask(self, position: int) -> Tensor | None:
        """Return the mask of a position, if it is there."""
        return self._mask[1] if self._mask is not None and self._mask[0] == position else None

    def hold(self, position: int, logits: Tensor) -> None:
        """Keep a copy of the logits (V,) of a position until its mask comes: one row a session."""
        self._waiting = position, logits.clone()

    def cut(self, end: int) -> None:
        """Forget logits that follow other than the first `end` tokens. A mask stays: it is of the client's own text."""
        if self._waiting is not None and self._waiting[0] > end:
            self._waiting = None


def mask_of(bits: bytes | memoryview, vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask (V,) bool from its bits, the least significant one of a byte first. Raises ValueError for one of
    another size, or that allows nothing."""
    if len(bits) != (vocab_size + 7) // 8:
        raise ValueError(f"a mask of {len(bits)} bytes for {vocab_size} tokens")
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    if not flags.any():
        raise ValueError("a mask that allows no token")
    return torch.from_numpy(flags).to(device)
