"""Parts of one vector in codecs that the sender chooses, within a fixed size: L-GreCo's message (arXiv 2210.17357).

    bytes |--choices--|--part 0--|--part 1--| ... |--0--|      choices: a byte a part, a number in `CODES`

The sender takes the codecs with the least squared error (`allocate`); a decoder reads them from the message. What the
parts leave of the size is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from optim.codecs.allocate import Choice, allocate
from optim.codecs.bits import Sign
from optim.codecs.blockwise import Int4, Int8
from optim.codecs.interface import ROW, Buffer, Codec, as_bytes, check_vector
from optim.codecs.two_bit import TwoBit
from peer.errors import ProtocolViolation

CODES: Final[tuple[Codec, ...]] = (Int8(), Int4(), TwoBit(), Sign())
"""`Ternary` is not among them: its expected error exceeds the vector itself, which error feedback would pile up."""
ROWS_JUDGED: Final = 2  # of a part, evenly spread: judging all rows would take longer than coding them


class MixedCode:
    """A `Codec` of one vector that is cut into parts of these lengths, each at least 1. `bits`: the size of the message
    for each value. It is more only if the smallest codecs need more, and less only if the largest need less."""

    name = "lgreco"
    unbiased = False
    needs_error_feedback = True
    idempotent = False  # the choice depends on the values

    def __init__(self, lengths: Sequence[int], bits: float) -> None:
        self.lengths, self.bits_per_value = tuple(lengths), bits
        self.granule = sum(lengths)
        self._sizes = [[code.encoded_size(length) for code in CODES] for length in lengths]
        wanted = math.ceil(bits * self.granule / 8) - len(lengths)
        self._room = min(max(wanted, sum(map(min, self._sizes))), sum(map(max, self._sizes)))

    def encoded_size(self, numel: int) -> int:
        """Return the bytes of the vector, or 0 for no values. ValueError for another length: it cannot be cut."""
        if numel not in (0, self.granule):
            raise ValueError(f"a vector of {self.granule} values is coded whole: ask for all instead of {numel}")
        return len(self.lengths) + self._room if numel else 0

    def encode(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.encode_with_sqnorm(x, out)[0]

    def encode_with_sqnorm(self, x: torch.Tensor, out: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
        size = self.encoded_size(check_vector(x).numel())
        out = torch.empty(size, dtype=torch.uint8, device=x.device) if out is None else out
        choices = self.choose(x)
        out[: len(choices)] = torch.tensor(choices, dtype=torch.uint8)
        total = 0.0
        for code, values, span in self._parts(choices):
            total += code.encode_with_sqnorm(x[values], out[span])[1]
        out[span.stop :] = 0
        return out, total

    def decode(self, data: Buffer, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
        raw = as_bytes(data, self.encoded_size(numel))
        out = torch.empty(numel, dtype=torch.float32, device=raw.device) if out is None else check_vector(out)
        for code, values, span in self._read(raw):
            code.decode(raw[span], values.stop - values.start, out[values])
        return out

    def decoded_sqnorm(self, data: Buffer, numel: int) -> float:
        raw = as_bytes(data, self.encoded_size(numel))
        return math.fsum(
            code.decoded_sqnorm(raw[span], values.stop - values.start) for code, values, span in self._read(raw)
        )

    def choose(self, x: torch.Tensor) -> list[int]:
        """Return the number of a codec for each part of x (n,) fp32: the least squared error, by a sample of each
        part's rows."""
        samples = [_sample(part) for part in x.split(self.lengths)]
        long = [i for i, length in enumerate(self.lengths) if length >= ROW]  # whole rows, judged in one call a codec
        tables: list[list[Choice]] = [[] for _ in samples]
        for group in [long, *([i] for i, length in enumerate(self.lengths) if length < ROW)]:
            for number, code in enumerate(CODES):
                for i, error in zip(group, _errors(code, [samples[i] for i in group]), strict=True):
                    share = self.lengths[i] / len(samples[i])
                    tables[i].append(Choice(self._sizes[i][number], error * share))
        return allocate(tables, self._room)

    def _read(self, raw: torch.Tensor) -> list[tuple[Codec, slice, slice]]:
        """Return a message's parts; `ProtocolViolation` unless its choices exist and fit, followed by zeros."""
        choices = raw[: len(self.lengths)].tolist()
        if max(choices) >= len(CODES):
            raise ProtocolViolation(f"a message chooses codec {max(choices)} of {len(CODES)}")
        parts = list(self._parts(choices))
        end = parts[-1][2].stop
        if end > len(raw):
            raise ProtocolViolation(f"a message's choices of codecs take {end} bytes of {len(raw)}")
        if bool(raw[end:].any()):
            raise ProtocolViolation("a message holds more than its choices of codecs take")
        return parts

    def _parts(self, choices: Sequence[int]) -> Iterator[tuple[Codec, slice, slice]]:
        """Yield each part's codec, and its span of the vector and of the message."""
        first, begin = 0, len(choices)
        for choice, length, sizes in zip(choices, self.lengths, self._sizes, strict=True):
            yield CODES[choice], slice(first, first + length), slice(begin, begin + sizes[choice])
            first, begin = first + length, begin + sizes[choice]


def _sample(part: torch.Tensor) -> torch.Tensor:
    """Return up to `ROWS_JUDGED` of the part's whole rows, flat, or all of a part without one."""
    rows = len(part) // ROW
    if not rows:
        return part
    return part[: rows * ROW].view(rows, ROW)[:: max(1, rows // ROWS_JUDGED)][:ROWS_JUDGED].reshape(-1)


def _errors(code: Codec, samples: Sequence[torch.Tensor]) -> list[float]:
    """Return the squared error of each sample, all coded together."""
    if not samples:
        return []
    together = torch.cat(list(samples))
    lost = code.decode(code.encode(together), len(together)).sub_(together).double()
    return [float(torch.dot(part, part)) for part in lost.split([len(sample) for sample in samples])]
