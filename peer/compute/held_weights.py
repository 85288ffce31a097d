"""Master weights of a trainer on its device: in fp32, or split into bf16 and a correction of its rounding.

P: parameters of the model. The outer weights that all peers hold, and the deltas that they send, are fp32 either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from peer.compute.optimizer import PIECE, InnerOptimizer
from peer.config import MasterType
from peer.ipc.inner_options import ElementRange
from peer.model.split_weights import SplitVector


def mix_into(local: Tensor, outer: Tensor, alpha: float) -> None:
    """local <- alpha * local + (1 - alpha) * outer, in place: Streaming DiLoCo's local update (arXiv 2501.18512). The
    vectors may be on different devices."""
    if alpha:
        local.mul_(alpha).add_((outer * (1 - alpha)).to(local.device))
    else:
        local.copy_(outer)


class HeldWeights(ABC):
    """Weights (P,) of one device. The blocks compute with `bound` (P,), whose storage stays the same."""

    bound: Tensor

    @abstractmethod
    def import_from(self, outer: Tensor) -> None:
        """Begin from outer (P,) fp32, on any device."""

    @abstractmethod
    def mix(self, outer: Tensor, ranges: Iterable[ElementRange], alpha: float) -> None:
        """local <- alpha * local + (1 - alpha) * outer (P,) at these elements."""

    @abstractmethod
    def write_delta(self, outer: Tensor, at: slice, out: Tensor) -> None:
        """Write outer (P,) - local at these elements to `out`, fp32 on the CPU."""

    @abstractmethod
    def step(self, optimizer: InnerOptimizer, gradient: Tensor) -> None:
        """Make a step of the optimizer with gradient (P,) fp32."""


def hold(kind: MasterType, numel: int, device: torch.device) -> HeldWeights:
    """Return `numel` zeros that are held as `kind` says."""
    if kind == "split":
        return SplitMaster(SplitVector.zeros(numel, device))
    return FloatMaster(torch.zeros(numel, device=device))


class FloatMaster(HeldWeights):
    """Weights in fp32, 4 bytes each."""

    def __init__(self, bound: Tensor) -> None:
        self.bound = bound

    def import_from(self, outer: Tensor) -> None:
        self.bound.copy_(outer)

    def mix(self, outer: Tensor, ranges: Iterable[ElementRange], alpha: float) -> None:
        for start, stop in ranges:
            mix_into(self.bound[start:stop], outer[start:stop], alpha)

    def write_delta(self, outer: Tensor, at: slice, out: Tensor) -> None:
        torch.sub(outer[at], self.bound[at].cpu(), out=out)

    def step(self, optimizer: InnerOptimizer, gradient: Tensor) -> None:
        optimizer.step(self.bound, gradient)


class SplitMaster(HeldWeights):
    """Weights in 3 bytes each (`peer.model.split_weights`). Few of them exist in fp32 at a time."""

    def __init__(self, vector: SplitVector) -> None:
        self.vector = vector
        self.bound = vector.narrow

    def import_from(self, outer: Tensor) -> None:
        for at in _pieces(slice(None), len(outer)):
            self.vector.write(at, outer[at].to(self.bound.device))

    def mix(self, outer: Tensor, ranges: Iterable[ElementRange], alpha: float) -> None:
        for start, stop in ranges:
            for at in _pieces(slice(start, stop), len(outer)):
                local = self.vector.read(at)
                mix_into(local, outer[at], alpha)
                self.vector.write(at, local)

    def write_delta(self, outer: Tensor, at: slice, out: Tensor) -> None:
        """Write outer - local, of the outer weights as this peer held them when it began: against exact ones the
        rounding would look like an update, the same one at every peer, which the outer step amplifies."""
        begin = at.indices(len(outer))[0]
        for part in _pieces(at, len(outer)):
            began = SplitVector.of(outer[part].to(self.bound.device)).read(slice(None))
            out[part.start - begin : part.stop - begin] = began.sub_(self.vector.read(part))

    def step(self, optimizer: InnerOptimizer, gradient: Tensor) -> None:
        optimizer.step_split(self.vector, gradient)


def _pieces(at: slice, numel: int) -> Iterator[slice]:
    """Yield these elements of a vector of `numel` in parts that are small beside it."""
    start, stop, _ = at.indices(numel)
    for begin in range(start, stop, PIECE):
        yield slice(begin, min(begin + PIECE, stop))
