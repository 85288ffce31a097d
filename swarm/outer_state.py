"""A peer's copy of the outer state: weights and outer momentum, changed only by a commit.

The next state is built slice by slice in a second pair of buffers while results still arrive, hashed, voted on, and
takes over by swapping the pairs. A round that is discarded leaves the current pair untouched."""

from __future__ import annotations

from typing import Final

import torch

from optim.codecs import Buffer, Codec
from optim.codecs.interface import as_bytes
from optim.outer import DilocoOuter
from peer.chunks import StateTree, hash_state

CHUNK: Final = 1 << 16  # values; the update and four pieces of state stay in one core's L2 cache


class OuterState:
    """theta, velocity: flat fp32, shape (P,). `tree` is the hash tree of the current pair; its root is the state
    hash."""

    def __init__(self, theta: torch.Tensor, velocity: torch.Tensor, outer: DilocoOuter) -> None:
        self.theta = theta
        self.velocity = velocity
        self.tree: StateTree = hash_state([theta, velocity])
        self._outer = outer
        self._next_theta = torch.empty_like(theta)
        self._next_velocity = torch.empty_like(velocity)
        self._next_tree: StateTree | None = None

    @property
    def numel(self) -> int:
        return self.theta.numel()

    @property
    def size_bytes(self) -> int:
        return 2 * 4 * self.theta.numel()

    def build(self, span: slice, codec: Codec, encoded: Buffer) -> None:
        """Apply the outer step to one slice, into the next state, which must be sealed again after that. `encoded`:
        this slice's merged pseudo-gradient; `ProtocolViolation` if it does not decode.

        A chunk at a time: the old state is read once, the new one is written once, the decoded update never leaves
        the cache."""
        self._next_tree = None
        numel = span.stop - span.start
        data = as_bytes(encoded, codec.encoded_size(numel))
        step = CHUNK if CHUNK % codec.granule == 0 else numel
        update = torch.empty(min(step, numel))
        for first in range(0, numel, step):
            size, begin = min(step, numel - first), codec.encoded_size(first)
            piece = codec.decode(data[begin : begin + codec.encoded_size(size)], size, update[:size])
            where = slice(span.start + first, span.start + first + size)
            self._outer.step_into(
                self._next_theta[where], self._next_velocity[where], self.theta[where], self.velocity[where], piece
            )

    def seal(self) -> bytes:
        """Hash the complete next state: what members vote on. Every slice must have been built."""
        self._next_tree = hash_state([self._next_theta, self._next_velocity])
        return self._next_tree.root

    def commit(self, state_hash: bytes) -> None:
        """Make the sealed next state current."""
        if self._next_tree is None or self._next_tree.root != state_hash:
            raise RuntimeError("only the sealed next state can be committed")
        self.theta, self._next_theta = self._next_theta, self.theta
        self.velocity, self._next_velocity = self._next_velocity, self.velocity
        self.tree, self._next_tree = self._next_tree, None

    def replace(self, theta: torch.Tensor, velocity: torch.Tensor, tree: StateTree) -> None:
        """Take over a state fetched from other peers; both vectors are copied."""
        self.theta.copy_(theta)
        self.velocity.copy_(velocity)
        self.tree, self._next_tree = tree, None
