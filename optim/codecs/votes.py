"""Votes of -1, 0 and 1, a bit each; their majority and their sums, without loss."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from optim.codecs.bits import TRITS, pack_trits, unpack_trits
from optim.codecs.interface import ROW, Buffer, as_bytes
from optim.codecs.rows import RowCodec, field
from peer.errors import ProtocolViolation

SENDERS_MAX: Final = 32_767  # a sum of votes fits in 16 bits
_GATHER: Final = 0x0102040810204080
"""Eight bytes of 0 or 1, as one number, times this have the eight bits in the product's highest byte."""


class Votes(RowCodec):
    """A sign a vote, and a bit for each block of 64 votes that are all 0.

    The votes on an unseen word's embedding are such blocks, and they stay 0. A 0 beside other votes has no code. It is
    sent as a sign: 1 where position + turn is even, else -1, with the round's number as the turn. Its two signs cancel
    in any two rounds, so it leads no further than one step, however many rounds there are. Neighbours go opposite ways.
    That is unbiased because a vote is 0 only before its value's first gradient, in odd and even rounds alike. A hash
    of position and round would walk as far as the root of their number. Draws of a generator would walk as well, move
    other draws, and differ where a round is repeated.

    Row: bit i is 1 if block i is all 0; from the next byte on, bit i is 1 for a vote of 1 on value i, else 0. Low bits
    come first. Bits of blocks that are all 0 and of padding are 0, so that votes have one form.
    """

    name = "votes"
    block = 64
    bits_per_value = 1 + 1 / 64

    def __init__(self, turn: int) -> None:
        self._sign_of_0 = torch.ones(ROW, dtype=torch.float32)  # rows and slices begin at even positions
        self._sign_of_0[1 - turn % 2 :: 2] = -1
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        self._eights = bits.float() * 2 - 1  # (256, 8)

    def row_bytes(self, values: int) -> int:
        return _flag_bytes(values // self.block) + values // 8

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        _check_votes(x, work)
        rows, m = x.shape
        blocks = m // self.block
        unseen = (x != 0).view(torch.int64).view(rows, blocks, -1).sum(2) == 0
        signs = torch.add(self._sign_of_0[:m].to(x.device), x, alpha=2, out=work) > 0
        signs[:, valid:] = False
        flags = unseen.new_zeros(rows, _flag_bytes(blocks) * 8)
        flags[:, :blocks] = unseen
        packed = _pack(signs)
        packed.view(torch.int64).masked_fill_(unseen, 0)
        out[:, : -m // 8] = _pack(flags)
        out[:, -m // 8 :] = packed

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        raw = as_bytes(data, self.encoded_size(numel))
        self._check_padding(raw, numel)
        return super().decode(raw, numel, out)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        rows, m = out.shape
        unseen, words = self._parts(data, m)
        index = words.masked_fill_(unseen, -1).view(torch.uint8).to(torch.int32).view(-1)  # 1 * 0 is 0, -1 * 0 is -0
        torch.index_select(self._eights.to(out.device), 0, index, out=out.view(-1, 8))
        out.view(rows, -1, self.block).mul_((~unseen)[:, :, None].float())

    def chunk_sqnorm(self, data: torch.Tensor, values: torch.Tensor, wide: torch.Tensor) -> float:
        """Count the votes other than 0."""
        numel = values.numel()
        self._check_padding(data, numel)
        rows, m = self._shape(numel)
        unseen, _ = self._parts(data.view(rows, -1), m)
        padding = 0 if bool(unseen[-1, -1]) else rows * m - numel
        return float(self.block * int((~unseen).sum()) - padding)

    def _parts(self, data: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which blocks are all 0, (R, m / 64), and each block's signs in one int64, likewise."""
        blocks = m // self.block
        flags = data[:, : -m // 8, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1
        unseen, unused = flags.view(len(data), -1).bool().split([blocks, flags[0].numel() - blocks], 1)
        words = field(data, _flag_bytes(blocks), data.shape[1], torch.int64)
        if bool(unused.any()) or bool((words * unseen).any()):
            raise ProtocolViolation("encoded votes have signs where there are none")
        return unseen, words

    def _check_padding(self, data: torch.Tensor, numel: int) -> None:
        rest = numel % self.block
        if rest and int(field(data[None, -8:], 0, 8, torch.int64)) >> rest:
            raise ProtocolViolation("encoded votes have signs after the last value")


class Decisions(RowCodec):
    """Five decisions of a majority to a byte: -1, 0 (a tie, or no vote) and 1, without loss."""

    name = "decisions"
    bits_per_value = 8 * -(-ROW // TRITS) / ROW
    unbiased = True

    def row_bytes(self, values: int) -> int:
        return -(-values // TRITS)

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        _check_votes(x, work)
        rows, m = x.shape
        trits = x.new_ones(rows, -(-m // TRITS) * TRITS)
        trits[:, :m].add_(x)
        pack_trits(trits, out)

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> None:
        torch.sub(unpack_trits(data, out.shape[1]), 1, out=out)


def tally_bytes(numel: int, senders: int) -> int:
    """Return the size of `pack_tally`'s bytes."""
    return _planes(senders) * -(-numel // 8)


def pack_tally(sums: torch.Tensor, senders: int) -> torch.Tensor:
    """Encode sums of the votes of `senders`, (n,) fp32, to uint8: sum + senders, a number of ceil(log2(2 senders + 1))
    bits, in as many planes of n bits, low bits first."""
    numbers = (sums + senders).to(torch.int32).numpy().astype(np.uint16)
    planes = [np.packbits((numbers >> bit) & 1, bitorder="little") for bit in range(_planes(senders))]
    return torch.from_numpy(np.concatenate(planes))


def unpack_tally(data: Buffer, numel: int, senders: int) -> torch.Tensor:
    """Return the sums, (n,) fp32; `ProtocolViolation` if a sum has more votes than senders."""
    planes = as_bytes(data, tally_bytes(numel, senders)).numpy().reshape(_planes(senders), -1)
    numbers = np.zeros(numel, np.uint16)
    for bit, plane in enumerate(planes):
        numbers |= np.unpackbits(plane, count=numel, bitorder="little").astype(np.uint16) << bit
    if numel and int(numbers.max()) > 2 * senders:
        raise ProtocolViolation("a sum of votes is larger than the number of voters")
    return torch.from_numpy(numbers.astype(np.float32)).sub_(senders)


def _planes(senders: int) -> int:
    return (2 * senders).bit_length()


def _check_votes(x: torch.Tensor, work: torch.Tensor) -> None:
    if not torch.equal(torch.sign(x, out=work), x):
        raise ValueError("a vote is not -1, 0 or 1: pass signs")


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """Pack (R, m) bool, m a multiple of 8, to (R, m / 8) uint8, low bits first."""
    return ((bits.view(torch.int64) * _GATHER >> 56) & 0xFF).to(torch.uint8)


def _flag_bytes(blocks: int) -> int:
    return -(-blocks // 8)
