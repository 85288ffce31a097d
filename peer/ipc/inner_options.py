"""Options of an inner run: where it begins, what it mixes in first, and what it leaves behind."""

from __future__ import annotations

from typing import Literal

import msgspec

ElementRange = tuple[int, int]
"""A half-open range of the flat vector, in elements."""


class InnerRunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an inner run. Ranges are half-open and ascending, and do not overlap."""

    begin: Literal["outer", "local"] = "outer"
    """The weights to begin from: the outer ones, or the worker's local ones. A new worker has no local weights: it
    begins from the outer ones and mixes nothing."""
    mix: tuple[ElementRange, ...] = ()
    """The ranges where local <- alpha * local + (1 - alpha) * outer before the first step (Streaming DiLoCo, arXiv
    2501.18512)."""
    alpha: float = 0.0
    """0 copies the outer weights exactly."""
    capture: tuple[ElementRange, ...] | None = None
    """The ranges of the product to write, one after the other, to the beginning of delta. None: the whole vector. ():
    nothing, and delta stays as it is."""
    product: Literal["delta", "gradient"] = "delta"
    """ "delta" is outer - local after the last step. "gradient" is the mean gradient over the samples at the outer
    weights; weights and optimizer do not move. Every sequence weighs the same, batches skipped for a NaN or Inf do not
    count (zero if all were skipped), and nothing is clipped."""

    def __post_init__(self) -> None:
        for name, ranges in (("mix", self.mix), ("capture", self.capture or ())):
            end = 0
            for start, stop in ranges:
                if not end <= start < stop:
                    raise ValueError(
                        f"{name} holds ({start}, {stop}): give ascending ranges that do not overlap and are not empty"
                    )
                end = stop
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha is {self.alpha}: it must lie in [0, 1]")
        if self.mix and self.begin == "outer":
            raise ValueError('mix needs begin = "local": outer weights have nothing to mix with')
        if self.product == "gradient" and self.begin == "local":
            raise ValueError('product = "gradient" needs begin = "outer": gradients are taken there')

    def check(self, numel: int) -> None:
        """Raise ValueError if a range leaves a vector of `numel` elements."""
        for start, stop in (*self.mix, *(self.capture or ())):
            if stop > numel:
                raise ValueError(f"the range ({start}, {stop}) leaves the flat vector of {numel} elements")
