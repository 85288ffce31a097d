"""The common part of all codecs: whole rows, a chunk of rows at a time.

    x     |--row--|--row--| ... |--row--|-tail-|      row: ROW values;  tail: the rest, padded to the codec's block
    bytes |-bytes-|-bytes-| ... |-bytes-|-bytes|      a row's bytes depend on that row alone

A vector may therefore be cut at any row: the pieces' bytes, concatenated, are the bytes of the whole. And a chunk of
rows fits in the L2 cache: a codec's four or five passes over it, into scratch that the next chunk reuses, cost little
more than one pass over memory. That is several times faster than the same passes over the whole vector. Where
`optim.kernels` has the codec in C, that makes one pass, a row at a time, to the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import ClassVar, Final

import torch

from optim.codecs.interface import ROW, Buffer, as_bytes, check_vector
from optim.kernels import kernels_for
from peer.errors import ProtocolViolation

CHUNK_CPU: Final = 64 * ROW  # values; x and scratch, 1 MiB each, are about one core's L2 cache (often 2 MiB)
CHUNK_GPU: Final = 1 << 26  # kernels want long vectors


class RowCodec(ABC):
    """A codec whose rows are independent. A subclass defines a row's bytes and codes a chunk of rows.

    Shapes: R rows of m values (m = `row`, or the padded tail's length) in b bytes each.
    """

    name: ClassVar[str]
    bits_per_value: ClassVar[float]
    unbiased: ClassVar[bool] = False
    needs_error_feedback: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True  # coding a decoded vector again changes nothing
    row: ClassVar[int] = ROW
    block: ClassVar[int] = 1  # the tail is padded with zeros to a multiple of it

    @abstractmethod
    def row_bytes(self, values: int) -> int:
        """Return b for a row of `values` values, a multiple of `block`."""

    @abstractmethod
    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        """Encode x (R, m) fp32, only read, into out (R, b) uint8. work (R, m) fp32: scratch. `valid`: the number of
        real values in a row; zeros follow. Checks that x is finite."""

    @abstractmethod
    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        """Decode data (R, b) uint8, only read, into out (R, m) fp32, finite. work (R, m) fp32: scratch."""

    def chunk_sqnorm(self, data: torch.Tensor, values: torch.Tensor, wide: torch.Tensor) -> float:
        """Return the squared norm of an encoded chunk as long as `values`, which is overwritten; `wide`: fp64 scratch.
        A subclass may have a faster way."""
        self.decode(data, values.numel(), values)
        total = 0.0
        for piece in values.split(wide.numel()):
            piece = wide[: piece.numel()].copy_(piece)
            total += float(torch.dot(piece, piece))
        return total

    @property
    def granule(self) -> int:
        return self.row

    def encoded_size(self, numel: int) -> int:
        rows, tail = divmod(numel, self.row)
        return rows * self.row_bytes(self.row) + (self.row_bytes(self._padded(tail)) if tail else 0)

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._encode(x, out, measure=False)[0]

    def encode_with_sqnorm(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
        return self._encode(x, out, measure=True)

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        raw = as_bytes(data, self.encoded_size(numel))
        out = torch.empty(numel, dtype=torch.float32, device=raw.device) if out is None else check_vector(out)
        if out.numel() != numel:
            raise ValueError(f"the vector to decode into has {out.numel()} values: pass one of {numel}")
        if (kernels := kernels_for(self.name, raw, out)) is not None and kernels.decode(raw, out):
            return out
        work = self._scratch(numel, out.device)
        for first, last, begin, end in self._chunks(numel, out.device):
            rows, m = self._shape(last - first)
            data_rows = raw[begin:end].to(out.device).view(rows, -1)
            if rows * m == last - first:
                self.decode_rows(data_rows, out[first:last].view(rows, m), work[: rows * m].view(rows, m))
            else:
                padded = torch.empty(rows, m, dtype=torch.float32, device=out.device)
                self.decode_rows(data_rows, padded, work[:m].view(rows, m))
                out[first:last] = padded.view(-1)[: last - first]
        return out

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        raw = as_bytes(data, self.encoded_size(numel))
        if (kernels := kernels_for(self.name, raw)) is not None:
            sqnorm = kernels.sqnorm(raw, numel)
            if sqnorm is not None:
                return sqnorm
        meter = _SquareMeter(self, raw.device)
        values = self._scratch(numel, raw.device)
        for first, last, begin, end in self._chunks(numel, raw.device):
            meter.add(raw[begin:end], values[: last - first])
        return meter.total

    def _encode(self, x: torch.Tensor, out: torch.Tensor | None, measure: bool) -> tuple[torch.Tensor, float]:
        n = check_vector(x).numel()
        size = self.encoded_size(n)
        out = torch.empty(size, dtype=torch.uint8, device=x.device) if out is None else out
        if out.dtype != torch.uint8 or out.shape != (size,) or not out.is_contiguous():
            raise ValueError(f"{n} values do not fit the output: pass a flat contiguous uint8 tensor of {size} bytes")
        if (kernels := kernels_for(self.name, x, out)) is not None:
            sqnorm = kernels.encode(x, out, measure)
            if sqnorm is not None:
                return out, sqnorm
        work = self._scratch(n, x.device)
        meter = _SquareMeter(self, x.device) if measure else None
        for first, last, begin, end in self._chunks(n, x.device):
            rows, m = self._shape(last - first)
            values = x[first:last]
            if rows * m != last - first:
                values = torch.zeros(rows * m, dtype=torch.float32, device=x.device)
                values[: last - first] = x[first:last]
            scratch = work[: rows * m].view(rows, m)
            self.encode_rows(values.view(rows, m), out[begin:end].view(rows, -1), scratch, (last - first) // rows)
            if meter is not None:
                meter.add(out[begin:end], work[: last - first])  # encode_rows needs the scratch no longer
        return out, meter.total if meter is not None else 0.0

    def _padded(self, tail: int) -> int:
        return -(-tail // self.block) * self.block

    def _shape(self, values: int) -> tuple[int, int]:
        """Return (rows, padded values in each) of one chunk."""
        return (values // self.row, self.row) if values % self.row == 0 else (1, self._padded(values))

    def _scratch(self, numel: int, device: torch.device) -> torch.Tensor:
        return torch.empty(min(_chunk(device), self._padded(numel)), dtype=torch.float32, device=device)

    def _chunks(self, numel: int, device: torch.device) -> list[tuple[int, int, int, int]]:
        """Return chunks of whole rows, then the tail: (first value, last value, first byte, last byte)."""
        step, whole = _chunk(device), numel // self.row * self.row
        edges = [*range(0, whole, step), whole, numel]
        return [
            (first, last, self.encoded_size(first), self.encoded_size(last))
            for first, last in pairwise(edges)
            if first < last
        ]


class _SquareMeter:
    """A float64 sum of the squares of decoded values, taken while each chunk is in the cache."""

    def __init__(self, codec: RowCodec, device: torch.device) -> None:
        self.total = 0.0
        self._codec = codec
        self._wide = torch.empty(_chunk(device) // 4, device=device, dtype=torch.float64)

    def add(self, data: torch.Tensor, values: torch.Tensor) -> None:
        """Add a chunk that decodes to the length of `values`, which is overwritten."""
        self.total += self._codec.chunk_sqnorm(data, values, self._wide)


def _chunk(device: torch.device) -> int:
    return CHUNK_CPU if device.type == "cpu" else CHUNK_GPU


def absmax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude along the last dimension, kept with length 1; `ProtocolViolation` if a value is not
    finite.

    It takes two plain reductions: torch's own `abs().amax()`, `aminmax` and inf-norm are 1.3 to 15 times slower.
    """
    largest = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    if not float(largest.max()) < math.inf:  # NaN, too, is not less
        raise ProtocolViolation(
            "a vector to encode holds values that are not finite, as training has diverged: lower the learning rate"
        )
    return largest


def field(data: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Read bytes [begin, end) of each row, (R, b) uint8, as `dtype`: a small copy, as rows are not aligned."""
    return data[:, begin:end].clone(memory_format=torch.contiguous_format).view(dtype)


def check_scales(scales: torch.Tensor, largest: float) -> torch.Tensor:
    """Return `scales` if all lie in [0, largest]; `ProtocolViolation` otherwise."""
    low, high = torch.aminmax(scales)
    if not (float(low) >= 0 and float(high) <= largest):
        raise ProtocolViolation("an encoded vector holds a scale that is negative, infinite or not a number")
    return scales
