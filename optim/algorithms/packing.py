"""The bytes of sparse messages, which `demo` and `sparseloco` send.

For each piece (a parameter, or a band of one), in order: the indices of the chosen coefficients, in as few bits as a
tile's size needs (12 for 64 x 64), then their values: fp32 each; or, quantized, an fp32 shift, fp32 levels, and a code
of log2(bins) bits each. Every field starts at a whole byte; numbers are little-endian; bits fill a byte from the low
end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from optim.codecs.interface import Buffer, as_bytes
from peer.errors import ProtocolViolation

Part: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""(index, value), each (tiles, k): the chosen coefficients of each tile of one piece, no index twice in a tile."""
Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(codes, levels, shift): the values are levels[codes] + shift."""


@dataclass(frozen=True)
class Sparse:
    """A message: one part for each piece, in order, and their quantized form where values are quantized."""

    parts: tuple[Part, ...]
    quantized: tuple[Quantized, ...] | None = None


class SparsePacking:
    """The format of one method's messages, which all have one size. `sizes`: (tiles, elements) of each piece; `kept`:
    coefficients of each of its tiles; `bins`: a power of 2, or None for fp32 values."""

    def __init__(self, sizes: Sequence[tuple[int, int]], kept: Sequence[int], bins: int | None) -> None:
        if bins is not None and (bins < 2 or bins & (bins - 1)):
            raise ValueError(f"bins is {bins}: set it to a power of 2")
        self.sizes, self.kept, self.bins = tuple(sizes), tuple(kept), bins

    @property
    def size(self) -> int:
        """The size of a message in bytes."""
        return sum(self._index_bytes(p) + self._value_bytes(p) for p in range(len(self.sizes)))

    def pack(self, message: Sparse) -> torch.Tensor:
        """Return the message as uint8, shape (size,). Values that are not quantized become fp32."""
        parts = []
        for p, (index, value) in enumerate(message.parts):
            parts.append(_pack_bits(index, self._index_bits(p)))
            if self.bins is None:
                parts.append(np.frombuffer(value.float().contiguous().numpy().tobytes(), np.uint8))
                continue
            assert message.quantized is not None
            codes, levels, shift = message.quantized[p]
            header = torch.cat([shift.float().reshape(1), levels.float()])
            parts += [np.frombuffer(header.numpy().tobytes(), np.uint8), _pack_bits(codes, self._code_bits)]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.empty(0, dtype=torch.uint8)

    def unpack(self, data: Buffer) -> Sparse:
        """Read a message. `ProtocolViolation` unless values are finite and indices exist, none twice in a tile."""
        raw = as_bytes(data, self.size).numpy()
        parts, quantized, at = [], [], 0
        for p, (tiles, elements) in enumerate(self.sizes):
            count = tiles * self.kept[p]
            index = _unpack_bits(raw[at : at + self._index_bytes(p)], self._index_bits(p), count)
            ordered = index.view(tiles, -1).sort(1).values
            if int(ordered.max()) >= elements or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                raise ProtocolViolation("a sparse message has an index twice in a tile or beyond it")
            at += self._index_bytes(p)
            field = raw[at : at + self._value_bytes(p)]
            if self.bins is None:
                value = torch.from_numpy(field.view(np.float32).copy())
            else:
                header = torch.from_numpy(field[: 4 * (1 + self.bins)].view(np.float32).copy())
                codes = _unpack_bits(field[4 * (1 + self.bins) :], self._code_bits, count)
                value = header[1:][codes] + header[0]
                quantized.append((codes.to(torch.uint8).view(tiles, -1), header[1:], header[0]))
            if not bool(torch.isfinite(value).all()):
                raise ProtocolViolation("a sparse message holds a value that is infinite or not a number")
            at += self._value_bytes(p)
            parts.append((index.view(tiles, -1), value.view(tiles, -1)))
        return Sparse(tuple(parts), tuple(quantized) if self.bins is not None else None)

    @property
    def _code_bits(self) -> int:
        assert self.bins is not None
        return self.bins.bit_length() - 1

    def _index_bits(self, p: int) -> int:
        return max(1, math.ceil(math.log2(self.sizes[p][1])))

    def _index_bytes(self, p: int) -> int:
        return -(-self.sizes[p][0] * self.kept[p] * self._index_bits(p) // 8)

    def _value_bytes(self, p: int) -> int:
        count = self.sizes[p][0] * self.kept[p]
        return 4 * count if self.bins is None else 4 * (1 + self.bins) + -(-count * self._code_bits // 8)


def _pack_bits(values: torch.Tensor, bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    numbers = values.reshape(-1).numpy().astype(np.uint16)
    return np.packbits((numbers[:, None] >> np.arange(bits, dtype=np.uint16)) & 1, bitorder="little")


def _unpack_bits(raw: np.ndarray[tuple[int], np.dtype[np.uint8]], bits: int, count: int) -> torch.Tensor:
    """Return int64, (count,)."""
    each = np.unpackbits(raw, count=count * bits, bitorder="little").reshape(count, bits)
    return torch.from_numpy(each.astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64)))
