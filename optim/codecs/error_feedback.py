"""Error feedback (arXiv 1901.09847) around any codec: what a message lost is added to the next."""

from __future__ import annotations

import torch

from optim.codecs import Codec


class ErrorFeedback:
    """What is sent plus what is kept is what was asked for: decoded + residual == x + old residual, exactly up to the
    one rounding of their sum in fp32."""

    def __init__(self, codec: Codec, numel: int) -> None:
        self.codec = codec
        self.residual = torch.zeros(numel)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (numel,) fp32, only read -> uint8."""
        wanted = self.residual + x
        data = self.codec.encode(wanted)
        self.residual = wanted.sub_(self.codec.decode(data, len(wanted)))
        return data
