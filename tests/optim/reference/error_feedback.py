"""Error feedback (arXiv 1901.09847) for any codec: the coding error of a message is added to the next message."""

from __future__ import annotations

import torch

from optim.codecs import Codec


class ErrorFeedback:
    """A codec with a residual: decoded + residual == x + old residual, up to the one rounding of their sum in fp32."""

    def __init__(self, codec: Codec, numel: int) -> None:
        self.codec = codec
        self.residual = torch.zeros(numel, dtype=torch.float32)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode `x` (numel,), fp32, only read, to uint8."""
        wanted = self.residual + x
        data = self.codec.encode(wanted)
        self.residual = wanted.sub_(self.codec.decode(data, len(wanted)))
        return data
