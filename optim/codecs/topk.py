"""Only the largest values of each row, for use with error feedback (arXiv 1809.07599)."""

from __future__ import annotations

import math
from typing import Final

import torch

from optim.codecs.interface import ROW
from optim.codecs.rows import RowCodec, absmax, field
from peer.errors import ProtocolViolation

INDEX_BITS: Final = 12


class TopK(RowCodec):
    """64 of each 4096 values, in bf16, and the same share of a shorter tail, rounded up to an even number. Row: values
    (2 bytes each) in the order of their places, then the places, two 12-bit numbers in three bytes, low bits first."""

    name = "topk"
    bits_per_value = 64 * (16 + INDEX_BITS) / ROW
    needs_error_feedback = True
    block = 2

    def row_bytes(self, values: int) -> int:
        return self._kept(values) * (16 + INDEX_BITS) // 8

    def _kept(self, values: int) -> int:
        return 2 * max(1, math.ceil(32 * values / ROW))

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        absmax(x)  # finite
        k = self._kept(x.shape[1])
        place = torch.topk(torch.abs(x, out=work), k, dim=1, sorted=False).indices.sort(1).values
        kept = torch.gather(x, 1, place).to(torch.bfloat16)
        absmax(kept.float())  # rounding may overflow
        pairs = place.to(torch.int32).view(len(x), -1, 2)
        both = pairs[..., 0] | (pairs[..., 1] << INDEX_BITS)  # 24 bits, little-endian in an int32
        out[:, : 2 * k] = kept.view(torch.uint8)
        out[:, 2 * k :] = both.unsqueeze(2).view(torch.uint8)[..., :3].reshape(len(x), -1)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        rows, m = out.shape
        k = self._kept(m)
        kept = field(data, 0, 2 * k, torch.bfloat16).float()
        packed = data[:, 2 * k :].reshape(rows, -1, 3).long()
        both = packed[..., 0] | (packed[..., 1] << 8) | (packed[..., 2] << 16)
        place = torch.stack([both & 0xFFF, both >> INDEX_BITS], dim=2).view(rows, k)
        if not bool((place[:, 1:] > place[:, :-1]).all()) or int(place.max()) >= m:
            raise ProtocolViolation("an encoded vector has places that are repeated, out of order or beyond its end")
        if not bool(torch.isfinite(kept).all()):
            raise ProtocolViolation("an encoded vector holds a value that is infinite or not a number")
        out.zero_().scatter_(1, place, kept)
