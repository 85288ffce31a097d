"""int8 and int4 with one scale a block: value = q * scale, scale = absmax / qmax, q rounded to nearest.

Work goes through chunks that stay in cache, with buffers that are reused: several times faster than whole-vector torch.
Layout: all q first, then the scales (fp32 for int8, fp16 for int4).
"""

from __future__ import annotations

import torch

from optim.codecs.floats import checked
from optim.codecs.interface import Buffer
from peer.errors import ProtocolViolation

CHUNK_VALUES = 1 << 18


class _Blockwise:
    name: str
    bits_per_value: float
    unbiased = False
    needs_error_feedback = False
    granule: int
    _qmax: int
    _scale_dtype: torch.dtype

    def encoded_size(self, numel: int) -> int:
        return self._q_bytes(numel) + self._blocks(numel) * self._scale_dtype.itemsize

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        n = x.numel()
        out = torch.empty(self.encoded_size(n), dtype=torch.uint8) if out is None else out
        q_bytes, scales = out[: self._q_bytes(n)], torch.empty(self._blocks(n))
        work = torch.empty(min(CHUNK_VALUES, self._padded(n)))
        for first in range(0, n, CHUNK_VALUES):
            last = min(n, first + CHUNK_VALUES)
            rows = work[: self._padded(last - first)].view(-1, self.granule)
            flat = rows.view(-1)
            flat[: last - first] = x[first:last]
            flat[last - first :] = 0.0
            absmax = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1)
            scale = (absmax / self._qmax).to(self._scale_dtype).float()
            scales[first // self.granule : first // self.granule + len(scale)] = scale
            inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
            rows.mul_(inverse[:, None]).round_().clamp_(-self._qmax, self._qmax)
            self._pack(flat, q_bytes, first, last)
        if not torch.isfinite(scales).all():
            raise ProtocolViolation("a vector to be sent holds values that are not finite")
        out[self._q_bytes(n) :] = scales.to(self._scale_dtype).view(torch.uint8)
        return out

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        raw = checked(data, self.encoded_size(numel))
        out = torch.empty(numel) if out is None else out
        scales = self._scales(raw, numel)
        work = torch.empty(min(CHUNK_VALUES, self._padded(numel)))
        for first in range(0, numel, CHUNK_VALUES):
            last = min(numel, first + CHUNK_VALUES)
            flat = work[: self._padded(last - first)]
            self._unpack(raw, flat, first, last)
            block = first // self.granule
            rows = flat.view(-1, self.granule)
            rows.mul_(scales[block : block + len(rows), None])
            out[first:last] = flat[: last - first]
        return out

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        raw = checked(data, self.encoded_size(numel))
        scales = self._scales(raw, numel)
        total = 0.0
        work = torch.empty(min(CHUNK_VALUES, self._padded(numel)))
        for first in range(0, numel, CHUNK_VALUES):
            last = min(numel, first + CHUNK_VALUES)
            flat = work[: self._padded(last - first)]
            self._unpack(raw, flat, first, last)
            block = first // self.granule
            rows = flat.view(-1, self.granule)
            norms = torch.linalg.vector_norm(rows, dim=1).double() * scales[block : block + len(rows)].double()
            total += float(norms.square().sum())
        return total

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.granule)

    def _padded(self, numel: int) -> int:
        return self._blocks(numel) * self.granule

    def _scales(self, raw: torch.Tensor, numel: int) -> torch.Tensor:
        return raw[self._q_bytes(numel) :].clone().view(self._scale_dtype).float()

    def _q_bytes(self, numel: int) -> int:
        raise AssertionError

    def _pack(self, flat: torch.Tensor, q_bytes: torch.Tensor, first: int, last: int) -> None:
        raise AssertionError

    def _unpack(self, raw: torch.Tensor, flat: torch.Tensor, first: int, last: int) -> None:
        raise AssertionError


class Int8(_Blockwise):
    name = "int8"
    granule = 4096
    bits_per_value = 8 + 32 / 4096
    _qmax = 127
    _scale_dtype = torch.float32

    def _q_bytes(self, numel: int) -> int:
        return numel

    def _pack(self, flat: torch.Tensor, q_bytes: torch.Tensor, first: int, last: int) -> None:
        q_bytes.view(torch.int8)[first:last] = flat[: last - first]

    def _unpack(self, raw: torch.Tensor, flat: torch.Tensor, first: int, last: int) -> None:
        flat[: last - first] = raw.view(torch.int8)[first:last]
        flat[last - first :] = 0.0


class Int4(_Blockwise):
    name = "int4"
    granule = 128
    bits_per_value = 4 + 16 / 128
    _qmax = 7
    _scale_dtype = torch.float16

    def _q_bytes(self, numel: int) -> int:
        return -(-numel // 2)

    def _pack(self, flat: torch.Tensor, q_bytes: torch.Tensor, first: int, last: int) -> None:
        q = flat[: (last - first + 1) // 2 * 2].add_(8.0).to(torch.uint8).view(-1, 2)
        q_bytes[first // 2 : first // 2 + len(q)] = q[:, 0] | (q[:, 1] << 4)

    def _unpack(self, raw: torch.Tensor, flat: torch.Tensor, first: int, last: int) -> None:
        packed = raw[first // 2 : (last + 1) // 2]
        pairs = flat[: 2 * len(packed)].view(-1, 2)
        pairs[:, 0] = packed & 15
        pairs[:, 1] = packed >> 4
        pairs.sub_(8.0)
        flat[last - first :] = 0.0
