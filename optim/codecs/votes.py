"""Votes of -1, 0 and 1, and their sums, coded without loss."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from optim.codecs.bits import TRITS, pack_trits, unpack_trits
from optim.codecs.interface import ROW, Buffer, as_bytes
from optim.codecs.rows import RowCodec
from peer.errors import ProtocolViolation

SENDERS_MAX: Final = 32_767  # a sum of votes fits in 16 bits


class Votes(RowCodec):
    """Five votes to a byte. A sign alone takes 1 bit but has no 0: the vote on a value without a gradient, such as the
    embedding of an unseen word, would be 1, and that weight would drift."""

    name = "votes"
    bits_per_value = 8 * -(-ROW // TRITS) / ROW
    unbiased = True

    def row_bytes(self, values: int) -> int:
        return -(-values // TRITS)

    def encode_rows(self, x: torch.Tensor, out: torch.Tensor, work: torch.Tensor, valid: int) -> None:
        rows, m = x.shape
        if not torch.equal(torch.sign(x, out=work), x):
            raise ValueError("a vote is not -1, 0 or 1: pass signs")
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
