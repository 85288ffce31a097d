"""Drawing under masks: the row of a position and its mask come in any order; the token is drawn once both are there.

The forward pass does not wait for a mask, and no other session does.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

ROWS_WAITING_MAX: Final = 2
"""Of one session. The client allows one position more than it has, so a server that takes over is sent two rows to draw
where the lost one had drawn a token that the client has not."""


class MaskedDraws:
    """Of one session: the last mask, and the logits that wait for theirs."""

    def __init__(self) -> None:
        self._mask: tuple[int, Tensor] | None = None
        self._waiting: dict[int, Tensor] = {}
        """Logits (V,) by position, in the order in which they came."""

    def give(self, position: int, mask: Tensor) -> Tensor | None:
        """Take the mask (V,) of a position; an earlier one is forgotten. Return the logits (V,) that waited for
        it."""
        self._mask = position, mask
        return self._waiting.pop(position, None)

    def mask(self, position: int) -> Tensor | None:
        """Return the mask of a position, if it is there."""
        return self._mask[1] if self._mask is not None and self._mask[0] == position else None

    def hold(self, position: int, logits: Tensor) -> None:
        """Keep a copy of the logits (V,) of a position until its mask comes."""
        self._waiting.pop(position, None)
        self._waiting[position] = logits.clone()
        if len(self._waiting) > ROWS_WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]

    def cut(self, end: int) -> None:
        """Forget logits that follow other than the first `end` tokens. A mask stays: it is of the client's own text."""
        self._waiting = {position: logits for position, logits in self._waiting.items() if position <= end}


def mask_of(bits: bytes | memoryview, vocab_size: int, device: torch.device) -> Tensor:
    """Return a mask (V,) fp32 from its bits, the least significant one of a byte first: inf for the tokens that may be
    drawn, -inf for the others. Raises ValueError for one of another size, or that allows nothing."""
    if len(bits) != (vocab_size + 7) // 8:
        raise ValueError(f"a mask of {len(bits)} bytes for {vocab_size} tokens")
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab_size].view(np.bool_)
    if not flags.any():
        raise ValueError("a mask that allows no token")
    return torch.from_numpy((2 * flags.astype(np.float32) - 1) * np.float32(np.inf)).to(device)
