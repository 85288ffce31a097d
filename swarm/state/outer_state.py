"""A peer's copy of the outer state: the weights and what else its method shares, changed only by a commit.

The next state is built slice by slice in a second set of buffers while results arrive, then hashed and voted on. A
commit swaps the sets. A discarded round leaves the current set untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from optim.codecs import Buffer
from optim.strategies.interface import Coding, OuterStrategy, RoundInfo
from peer.checkpoint.hash_tree import StateTree, hash_state
from peer.checkpoint.held_state import HeldState


class OuterState:
    """The current state and the next one.

    `tensors`: [theta, *strategy.shared], each flat fp32, shape (P,). `tree`: their hash tree; its root is the state
    hash.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], strategy: OuterStrategy) -> None:
        if len(tensors) != 1 + len(strategy.shared):
            raise ValueError(f"the method shares {1 + len(strategy.shared)} vectors, not {len(tensors)}")
        self.tensors = list(tensors)
        self.strategy = strategy
        self.tree: StateTree = hash_state(self.tensors)
        self._next = [torch.empty_like(tensor) for tensor in tensors]
        self._next_tree: StateTree | None = None
        self._apart: tuple[slice, ...] = (slice(0, self.numel),)  # where the next set may differ from the current one
        self._whole: torch.Tensor | None = None  # the merged update, for a method that steps on all of it at once
        self._round_info: RoundInfo | None = None
        self._coding: Coding | None = None
        self._held: tuple[HeldState, ...] = ()

    @property
    def theta(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def numel(self) -> int:
        return self.theta.numel()

    @property
    def size_bytes(self) -> int:
        return len(self.tensors) * 4 * self.numel

    @property
    def next_hash(self) -> bytes:
        """The hash of the complete next state; empty while there is none."""
        return self._next_tree.root if self._next_tree is not None else b""

    @property
    def changed(self) -> tuple[slice, ...]:
        """The slices that the last commit changed."""
        return self._apart

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return dict(zip(("theta", *self.strategy.shared), self.tensors, strict=True))

    @contextmanager
    def held(self) -> Iterator[HeldState]:
        """Give the current state to a reader in another thread, as it is, inside the block: later ones are built
        meanwhile."""
        held = HeldState(self.named(), self.tree)
        self._held = (*self._held, held)
        try:
            yield held
        finally:
            self._held = tuple(other for other in self._held if other is not held)

    def _keep(self, tensors: Sequence[torch.Tensor], place: slice) -> None:
        """Let readers have what is about to change."""
        for held in self._held:
            if held.is_of(tensors):
                held.keep(place)

    def begin(self, round_info: RoundInfo, coding: Coding) -> None:
        """Begin to build the state after that round from the current one. Drops one that was begun before."""
        self._next_tree = None
        self._round_info, self._coding = round_info, coding
        if not self.strategy.elementwise and self._whole is None:
            self._whole = torch.empty_like(self.theta)
        if sum(place.stop - place.start for place in coding.places) < self.numel:
            for place in self._apart:
                self._keep(self._next, place)
                for after, before in zip(self._next, self.tensors, strict=True):
                    after[place] = before[place]
        self._apart = coding.places

    def build(self, index: int, result: Buffer) -> None:
        """Apply one slice's merged update; `ProtocolViolation` if it does not decode.

        One piece at a time: the old state is read once, the new one written once, and the decoded update stays in the
        cache.
        """
        assert self._coding is not None and self._round_info is not None
        self._next_tree = None
        for place, update in self._coding.updates(index, result):
            if self._whole is not None:
                self._whole[place] = update
                continue
            self._keep(self._next, place)
            after, before = [t[place] for t in self._next], [t[place] for t in self.tensors]
            self.strategy.step_into(self._round_info, after, before, update)

    def hash_next(self) -> bytes:
        """Hash the complete next state, for the vote. Every slice must have been built."""
        if self._whole is not None:
            assert self._round_info is not None
            self._keep(self._next, slice(0, self.numel))
            self.strategy.step_into(self._round_info, self._next, self.tensors, self._whole)
        self._next_tree = hash_state(self._next)
        return self._next_tree.root

    def hash_unchanged(self) -> bytes:
        """Make the current state the next one as well, instead of building slices. Return its hash."""
        self._keep(self._next, slice(0, self.numel))
        for after, before in zip(self._next, self.tensors, strict=True):
            after.copy_(before)
        self._apart = ()
        self._next_tree = self.tree
        return self.tree.root

    def commit(self, state_hash: bytes) -> None:
        """Make the next state current. Its hash must be `state_hash`."""
        if self._next_tree is None or self._next_tree.root != state_hash:
            raise RuntimeError("only the hashed next state can be committed")
        self.tensors, self._next = self._next, self.tensors
        self.tree, self._next_tree = self._next_tree, None

    def replace(self, tensors: Sequence[torch.Tensor], tree: StateTree) -> None:
        """Take over a state fetched from other peers; the vectors are copied."""
        self.tree, self._next_tree = tree, None  # first: what is no whole state is not saved as the one before
        self._keep(self.tensors, slice(0, self.numel))
        for mine, fetched in zip(self.tensors, tensors, strict=True):
            mine.copy_(fetched)
        self._apart = (slice(0, self.numel),)
