"""INTELLECT-1's int8 (arXiv 2412.01152): uniform bins over mean +- 6 sigma, each decoded to the mean of its values.

As the paper describes it. Its code (PrimeIntellect-ai/prime, compression.cpp) has 256 bins over 6 sigma in all, 3 on
each side of 0, and decodes to their middles: finer bins, but a single value for everything outside.
"""

from __future__ import annotations

from typing import Final

import torch

from optim.codecs.rows import RowCodec, absmax, field
from peer.errors import ProtocolViolation

BINS: Final = 256
SIGMAS: Final = 6.0


class SixSigma(RowCodec):
    """int8 with a codebook for each row, so rows are long: 65,536 values. Values outside the range fall into the
    outermost bins. Row: 256 fp32 means (0 for an empty bin), then a byte a value."""

    name = "int8_6sigma"
    row = 1 << 16
    bits_per_value = 8 + BINS * 32 / (1 << 16)
    idempotent = False  # the decoded values have another mean and deviation

    def row_bytes(self, values: int) -> int:
        return BINS * 4 + values

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        absmax(x)  # finite
        rows, real = len(x), x[:, :valid]
        mean = real.mean(1, keepdim=True)
        centred = torch.sub(real, mean, out=work[:, :valid])
        sigma = torch.linalg.vector_norm(centred, dim=1, keepdim=True).div_(max(1, valid - 1) ** 0.5)
        width = torch.where(sigma > 0, sigma * (2 * SIGMAS / BINS), 1.0)
        q = centred.div_(width).add_(BINS / 2).floor_().clamp_(0, BINS - 1)
        codes = q.to(torch.uint8)
        book = torch.empty(rows, BINS, dtype=torch.float32, device=x.device)
        for r in range(rows):
            counts = torch.bincount(codes[r], minlength=BINS).clamp_(min=1)
            book[r] = torch.bincount(codes[r].long(), weights=real[r], minlength=BINS).div_(counts)
        out[:, : BINS * 4] = book.view(torch.uint8)
        out[:, BINS * 4 :] = codes

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        book = field(data, 0, BINS * 4, torch.float32)
        if not bool(torch.isfinite(book).all()):
            raise ProtocolViolation("an encoded vector's codebook holds a value that is infinite or not a number")
        for r in range(len(data)):
            torch.index_select(book[r], 0, data[r, BINS * 4 :].to(torch.int32), out=out[r])
