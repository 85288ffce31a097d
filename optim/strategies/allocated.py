"""L-GreCo on the network (arXiv 2210.17357): each layer of a message gets its own number of bits.

Every sender chooses by its own message, the update and what error feedback owes, within a fixed number of bits a value.
The message says what was chosen (`optim.codecs.mixed`). Large layers are cut further: a slice of one layer alone could
not mix codecs to use up its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from optim.codecs import ROW, Codec
from optim.codecs.mixed import CODES, MixedCode
from optim.strategies.dense import DenseCoding, DenseFormat
from optim.strategies.interface import NewVector, in_memory
from peer.model.layout import FlatLayout

PARTS: Final = 16  # of a slice at least, where it has as many rows


class AllocatedCoding(DenseCoding):
    """A dense coding whose slices are cut into parts of layers, `bits` a value."""

    def __init__(self, layout: FlatLayout, places: Sequence[slice], down: Codec, bits: float) -> None:
        super().__init__(places, CODES[-1], down)  # all of CODES are cut at rows
        edges, reached = {0}, 0  # where layers begin in the message
        for place in self.places:
            begins = (slot.offset - place.start for slot in layout.slots.values())
            edges |= {reached + begin for begin in begins if 0 <= begin < place.stop - place.start}
            reached += place.stop - place.start
        self._codes = [MixedCode(_lengths(self.span(index), sorted(edges)), bits) for index in range(self.count)]

    def code(self, index: int) -> MixedCode:
        return self._codes[index]


class AllocatedFormat(DenseFormat):
    """Dense messages whose layers differ in codec. `fragments`: the places of each; `bits`: a message's, a value."""

    def __init__(
        self,
        layout: FlatLayout,
        fragments: Sequence[Sequence[slice]],
        down: Codec,
        bits: float,
        new_vector: NewVector = in_memory,
    ) -> None:
        super().__init__(fragments, CODES[-1], down, new_vector=new_vector)
        self._codings = [AllocatedCoding(layout, places, down, bits) for places in fragments]


def _lengths(span: slice, edges: Sequence[int]) -> list[int]:
    """Return the lengths of a slice's parts: layers, cut at rows into pieces of a `PARTS`-th of the slice."""
    most = max(1, (span.stop - span.start) // (PARTS * ROW)) * ROW
    cuts = [span.start, *(edge for edge in edges if span.start < edge < span.stop), span.stop]
    return [min(most, last - at) for first, last in pairwise(cuts) for at in range(first, last, most)]
