"""What an inner run is asked to begin from, to mix in before it and to leave behind."""

from __future__ import annotations

from typing import Literal

import msgspec

Span = tuple[int, int]
"""A half-open stretch of the flat vector, in elements."""


class InnerRunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """P: length of the flat vector. Spans are half-open, ascending, and do not overlap.

    `begin`: from the outer weights, or from where the worker's local weights are. A worker that was started anew has
    none: there "local", too, begins from the outer weights, and there is nothing to mix.
    `mix`: on these spans local <- alpha * local + (1 - alpha) * outer before the first step (Streaming DiLoCo, arXiv
    2501.18512); alpha 0 copies the outer weights exactly.
    `capture`: where the product is wanted; its values at these spans are written one after the other to the beginning
    of delta. None: everywhere; (): nothing, and delta is left alone.
    `product`: "delta" is outer - local after the last step. With "gradient" the weights stay at the outer ones, no
    inner optimizer moves, and the product is the mean gradient over the samples: every sequence weighs the same,
    batches that were skipped for a NaN or Inf do not count (zero, if all were), nothing is clipped.
    """

    begin: Literal["outer", "local"] = "outer"
    mix: tuple[Span, ...] = ()
    alpha: float = 0.0
    capture: tuple[Span, ...] | None = None
    product: Literal["delta", "gradient"] = "delta"

    def __post_init__(self) -> None:
        for name, spans in (("mix", self.mix), ("capture", self.capture or ())):
            end = 0
            for start, stop in spans:
                if not end <= start < stop:
                    raise ValueError(f"{name} holds ({start}, {stop}): spans ascend, do not overlap and are not empty")
                end = stop
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha is {self.alpha}: it must lie in [0, 1]")
        if self.mix and self.begin == "outer":
            raise ValueError('mix needs begin = "local": outer weights have nothing to mix with')
        if self.product == "gradient" and self.begin == "local":
            raise ValueError('product = "gradient" needs begin = "outer": gradients are taken there')

    def check(self, numel: int) -> None:
        """Raises ValueError where a span leaves a vector of `numel` elements."""
        for start, stop in (*self.mix, *(self.capture or ())):
            if stop > numel:
                raise ValueError(f"the span ({start}, {stop}) leaves the flat vector of {numel} elements")
