"""L-GreCo on the network (arXiv 2210.17357): each slice of a message gets its own number of bits.

Slices are equal parts of the flat vector (at most 12 of a small model), not layers. The choice is made on the shared
momentum, not on the delta: momentum resembles the next deltas and is the same at all members, so all choose alike
without a message. The error of int4 everywhere is the budget. Dynamic programming takes bits from slices with little
error and gives them to slices with much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from optim.codecs import Codec, get_codec
from optim.codecs.allocate import Choice, allocate
from optim.codecs.interface import ROW
from optim.codecs.rows import absmax
from optim.deterministic import ordered_sum, square_sum
from optim.strategies.dense import DenseCoding, DenseFormat
from optim.strategies.interface import Check, go_on
from peer.errors import ConfigError

CODES: Final = tuple(get_codec(name) for name in ("int8", "int4", "ternary"))
USUAL: Final = get_codec("int4")
ROWS_JUDGED: Final = 16  # of a slice, evenly spread: judging all rows would take seconds in a large model


class AllocatedCoding(DenseCoding):
    """A dense coding with a codec for each slice, `codes`; all of them may be cut at rows."""

    def __init__(self, places: Sequence[slice], codes: Sequence[Codec], down: Codec) -> None:
        super().__init__(places, USUAL, down)
        self._codes = tuple(codes)

    def code(self, index: int) -> Codec:
        return self._codes[index]


class AllocatedFormat(DenseFormat):
    """Dense messages whose slices differ in codec. `budget`: the error allowed, relative to int4 everywhere.

    None of the codecs needs error feedback."""

    def __init__(self, fragments: Sequence[Sequence[slice]], down: Codec, budget: float) -> None:
        super().__init__(fragments, USUAL, down)
        self._down, self._budget = down, budget

    def coding(self, fragment: int, momentum: torch.Tensor, check: Check = go_on) -> DenseCoding:
        usual = self._codings[fragment]
        parts = [momentum[place] for place in usual.places]
        vector = parts[0] if len(parts) == 1 else torch.cat(parts)
        codes = choose([vector[usual.span(i)] for i in range(usual.count)], self._budget, check)
        return AllocatedCoding(usual.places, codes, self._down)


def choose(slices: Sequence[torch.Tensor], budget: float, check: Check = go_on) -> list[Codec]:
    """Return a codec for each slice (flat fp32). A slice that is all 0 gets int4. If even int8 everywhere exceeds the
    budget, all others get int8. `check` is called before each slice."""
    nonzero = [i for i, values in enumerate(slices) if bool(values.any())]
    tables: list[list[Choice]] = []
    for i in nonzero:
        check()
        tables.append([Choice(code.name, *_cost(code, slices[i])) for code in CODES])
    chosen = [USUAL] * len(slices)
    allowed = budget * sum(choice.error for table in tables for choice in table if choice.name == USUAL.name)
    try:
        names = [choice.name for choice in allocate(tables, allowed)]
    except ConfigError:
        names = ["int8"] * len(nonzero)
    for i, name in zip(nonzero, names, strict=True):
        chosen[i] = get_codec(name)
    return chosen


def _cost(code: Codec, values: torch.Tensor) -> tuple[int, float]:
    """Return the bytes of the slice and its squared error, estimated from a sample. A ternary code is random; its
    expected error, s |x| - x^2 for a row's scale s, is the same at all peers. Sums are in a fixed order."""
    rows = values.split(ROW)
    rows = rows[:: max(1, len(rows) // ROWS_JUDGED)]
    error = 0.0
    for row in rows:
        if code.name == "ternary":
            expected = (row.abs() * absmax(row)).sub_(row * row)
            error += ordered_sum(expected.double())
        else:
            error += square_sum(code.decode(code.encode(row.contiguous()), len(row)) - row)
    return code.encoded_size(len(values)), error * len(values) / sum(map(len, rows))
