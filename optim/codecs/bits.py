"""One bit and log2(3) bits a value: scaled signs (arXiv 1901.09847) and TernGrad (arXiv 1705.07878)."""

from __future__ import annotations

import math
from typing import Final

import torch

from optim.codecs.interface import ROW
from optim.codecs.rows import RowCodec, absmax, check_scales, field
from peer.errors import ProtocolViolation

TRITS: Final = 5  # to a byte: 3^5 = 243


class Sign(RowCodec):
    """sign(x) times the row's mean magnitude (bf16), the form of 1-bit coding whose error feedback converges. 0 counts
    as positive. Row: scale (2 bytes), then bit i of byte j for value i * (m / 8) + j."""

    name = "sign"
    bits_per_value = 1 + 16 / ROW
    needs_error_feedback = True
    block = 8

    def row_bytes(self, values: int) -> int:
        return 2 + values // 8

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        absmax(x)  # finite
        scale = torch.abs(x, out=work).sum(1, keepdim=True).div_(valid).to(torch.bfloat16)
        bits = torch.ge(x, 0).view(torch.uint8).view(len(x), 8, -1)
        packed = bits[:, 0].clone()
        for i in range(1, 8):
            packed |= bits[:, i] << i
        out[:, :2] = scale.view(torch.uint8)
        out[:, 2:] = packed

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        scale = check_scales(field(data, 0, 2, torch.bfloat16).float(), largest=math.ldexp(1.0, 127))
        packed, eighths = data[:, 2:], out.view(len(data), 8, -1)
        for i in range(8):
            eighths[:, i] = (packed >> i) & 1
        out.mul_(2).sub_(1).mul_(scale)


class Ternary(RowCodec):
    """TernGrad: s * sign(x) with probability |x| / s, else 0; s = the row's absmax, rounded up to bf16. Unbiased, and
    random: coding a vector twice gives different bytes (torch's default generator). The paper's clipping at 2.5 sigma
    is left out, as it is a bias. Row: scale (2 bytes), then t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4 of values m / 5 apart."""

    name = "ternary"
    bits_per_value = 8 * (2 + -(-ROW // TRITS)) / ROW
    unbiased = True

    def row_bytes(self, values: int) -> int:
        return 2 + -(-values // TRITS)

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        rows, m = x.shape
        scale = absmax(x)
        scale.view(torch.int32).add_(0xFFFF).bitwise_and_(~0xFFFF)
        scale.clamp_(min=2.0**-126)
        # floor(|x| / s + u), u uniform in [0, 1): 1 with probability |x| / s. The sign goes through the multiplication.
        trits = x.new_zeros(rows, -(-m // TRITS) * TRITS)
        torch.div(x, scale, out=trits[:, :m])
        sign = torch.sign(trits[:, :m])
        trits[:, :m].abs_().add_(work.uniform_()).floor_().clamp_(max=1).mul_(sign)
        out[:, :2] = scale.to(torch.bfloat16).view(torch.uint8)
        pack_trits(trits.add_(1), out[:, 2:])

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        scale = check_scales(field(data, 0, 2, torch.bfloat16).float(), largest=math.ldexp(1.0, 127))
        torch.mul(unpack_trits(data[:, 2:], out.shape[1]).sub_(1), scale, out=out)


def pack_trits(trits: torch.Tensor, out: torch.Tensor) -> None:
    """Pack (R, m) of 0, 1 and 2 in fp32, m a multiple of 5, into out (R, m / 5) uint8: t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4
    of values m / 5 apart."""
    fifths = trits.view(len(trits), TRITS, -1)
    packed = fifths[:, TRITS - 1].clone()
    for i in reversed(range(TRITS - 1)):
        packed.mul_(3).add_(fifths[:, i])
    out.copy_(packed)


def unpack_trits(data: torch.Tensor, m: int) -> torch.Tensor:
    """Invert `pack_trits`: (R, m) fp32; `ProtocolViolation` if a byte is not five trits."""
    if len(data) and int(data.max()) >= 3**TRITS:
        raise ProtocolViolation("an encoded vector holds a byte that is not five trits")
    rest = data.float()
    trits = torch.empty(len(data), TRITS, rest.shape[1], dtype=torch.float32, device=data.device)
    for i in range(TRITS):
        thirds = ((rest - 1) / 3).round_()  # always right: the remainder is -1, 0 or 1 thirds away
        torch.sub(rest, thirds, alpha=3, out=trits[:, i])
        rest = thirds
    return trits.view(len(data), -1)[:, :m]
