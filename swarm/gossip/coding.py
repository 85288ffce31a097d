"""Encoding of a gossip update, phi and delta, and the outer step from a pair's two updates.

Both halves are cut into the same slices; delta is coded by the run's `up` codec, phi by its `down` codec. A peer uses
its own update as its partner sees it, decoded. So both compute the same mean to the bit, their pulls on each other are
equal and opposite, and where both hold the same phi the codec moves neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from blake3 import blake3

from optim.algorithms.gossip import pair_mean, pair_step
from optim.codecs import Codec
from optim.strategies.dense import DenseCoding, Feedback
from swarm.gossip.messages import Half

CHUNK: Final = 1 << 16  # values; a few pieces stay in one core's L2 cache


@dataclass(frozen=True)
class Packed:
    """One half of an update, encoded."""

    slices: tuple[memoryview, ...]
    """uint8."""
    hashes: tuple[bytes, ...]
    """blake3, one a slice."""


@dataclass(frozen=True)
class PairMessage:
    """One peer's update, encoded."""

    phi: Packed
    delta: Packed


@dataclass(frozen=True)
class Compared:
    """L2 norms of a pair's decoded updates."""

    my_phi: float
    my_delta: float
    phi: float
    """The partner's, as `delta`."""
    delta: float
    distance: float
    """Of the difference between the two phi."""

    @property
    def relative_distance(self) -> float:
        """The distance of the two phi in lengths of this peer's own."""
        return self.distance / self.my_phi if self.my_phi else self.distance


class PairCoding:
    """Encodes vectors of `numel` values. All methods block. `pack_delta` and `restore_residual` share the error
    feedback's residual: they must not run at the same time."""

    def __init__(self, numel: int, up: Codec, down: Codec) -> None:
        self._cut = DenseCoding([slice(0, numel)], up, down)
        self._feedback = Feedback()

    @property
    def count(self) -> int:
        """Slices in each half."""
        return self._cut.count

    def size(self, half: Half, index: int) -> int:
        """Return the exact size of a slice in bytes."""
        size: int = self._codec(half).encoded_size(self._cut.size(index))
        return size

    def total(self, half: Half) -> int:
        """Return the size of a half in bytes."""
        return sum(self.size(half, index) for index in range(self.count))

    def pack_phi(self, theta: torch.Tensor) -> Packed:
        """Encode theta, (P,). Raises ProtocolViolation if it does not fit the codec."""
        out = self._room("phi")
        for index, piece in enumerate(out):
            self._cut.down.encode(theta[self._cut.span(index)], piece)
        return _packed(out)

    def pack_delta(self, delta: torch.Tensor) -> Packed:
        """Encode delta, (P,), only read. Raises ProtocolViolation if it is not finite."""
        out = self._room("delta")
        self._feedback.encode(self._cut, delta, out)
        return _packed(out)

    def restore_residual(self, delta: Packed) -> None:
        """Put a delta that no partner has merged back into the error feedback."""
        self._feedback.restore_residual(self._cut, delta.slices)

    def delta_norm(self, delta: Packed) -> float:
        """Return the L2 norm of what `delta` decodes to."""
        slices = enumerate(delta.slices)
        return math.sqrt(sum(self._cut.up.decoded_sqnorm(piece, self._cut.size(i)) for i, piece in slices))

    def compare(self, mine: PairMessage, theirs: PairMessage) -> Compared:
        """Return the norms of both updates. Raises ProtocolViolation if a slice of theirs does not decode."""
        sums = [0.0] * 5
        for index in range(self.count):
            my_phi, phi = self._phi(mine, index), self._phi(theirs, index)
            size = self._cut.size(index)
            sums[0] += _sqnorm(my_phi)
            sums[1] += self._cut.up.decoded_sqnorm(mine.delta.slices[index], size)
            sums[2] += _sqnorm(phi)
            sums[3] += self._cut.up.decoded_sqnorm(theirs.delta.slices[index], size)
            sums[4] += _sqnorm(my_phi.sub_(phi))
        return Compared(*map(math.sqrt, sums))

    def step(
        self,
        theta: torch.Tensor,
        move: torch.Tensor,
        mine: PairMessage,
        theirs: PairMessage,
        constants: tuple[float, float, float],
    ) -> None:
        """Make the outer step of NoLoCo with the pair's means, in place. `constants`: alpha, beta, gamma."""
        for index, (delta, phi) in enumerate(self.means(mine, theirs)):
            span = self._cut.span(index)
            apart = self._phi(mine, index).sub_(phi)
            pair_step(theta[span], move[span], delta, apart, constants)

    def means(self, mine: PairMessage, theirs: PairMessage) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pair's mean delta and mean phi, slice by slice. They are the same bits on both sides: the sum of
        two floats does not depend on their order."""
        for index in range(self.count):
            deltas = [self._delta(message, index) for message in (mine, theirs)]
            phis = [self._phi(message, index) for message in (mine, theirs)]
            yield pair_mean(*deltas), pair_mean(*phis)

    def _phi(self, message: PairMessage, index: int) -> torch.Tensor:
        return self._cut.down.decode(message.phi.slices[index], self._cut.size(index))

    def _delta(self, message: PairMessage, index: int) -> torch.Tensor:
        return self._cut.up.decode(message.delta.slices[index], self._cut.size(index))

    def _codec(self, half: Half) -> Codec:
        return self._cut.down if half == "phi" else self._cut.up

    def _room(self, half: Half) -> list[torch.Tensor]:
        return [torch.empty(self.size(half, index), dtype=torch.uint8) for index in range(self.count)]


def step_alone(
    theta: torch.Tensor, move: torch.Tensor, delta: torch.Tensor, constants: tuple[float, float, float]
) -> None:
    """Make the outer step of a peer without a partner: with its own delta, uncoded."""
    zero = torch.zeros_like(theta[:CHUNK])
    for first in range(0, theta.numel(), CHUNK):
        t, m, d = (x[first : first + CHUNK] for x in (theta, move, delta))
        pair_step(t, m, d, zero[: len(t)], constants)


def _packed(out: Sequence[torch.Tensor]) -> Packed:
    views = tuple(memoryview(piece.numpy().data) for piece in out)
    return Packed(views, tuple(blake3(view).digest() for view in views))


def _sqnorm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
