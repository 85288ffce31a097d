"""Types of message fields with their bounds: each number has two, each text, hash and list a largest size.

msgspec refuses what lies outside, NaN and infinity included, before any code of ours sees it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final, TypeVar

import msgspec

HASH_BYTES: Final = 32
MEMBERS_MAX: Final = 4096
ADDRESSES_MAX: Final = 16  # of one peer
TENSORS_MAX: Final = 1 << 20  # tensors of a model
SLICES_MAX: Final = 1 << 16  # of one update
NUMBERS_END: Final = 1 << 53

Name = Annotated[str, msgspec.Meta(max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=128)]
Hash = Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=-1, le=NUMBERS_END)]  # -1 stands for "before the first"
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBERS_END)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
UnixTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
"""Of bytes, steps or micro-batches a second, and other amounts that are not below zero."""
LOSS_MAX: Final = 1e12
Loss = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""Nats."""
SquaredNorm = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]

ParameterName = Annotated[str, msgspec.Meta(max_length=256)]
Address = Annotated[str, msgspec.Meta(max_length=512)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
AddressesOf = Annotated[dict[Name, Addresses], msgspec.Meta(max_length=MEMBERS_MAX)]
"""The addresses of peers, by peer id."""


def finite_loss(loss: float | None) -> float | None:
    """Return a loss as a message or an event may carry it: None for NaN, infinity and what is out of its bounds."""
    return loss if loss is not None and abs(loss) <= LOSS_MAX else None


def smoothed(old: float | None, new: float, weight: float) -> float:
    """Return `old` moved towards a new measurement by that share of the difference; the measurement itself if it is the
    first one (`old` is None)."""
    return new if old is None else old + weight * (new - old)


K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """The `most` entries that were set last, in that order, an entry that is set again among them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
