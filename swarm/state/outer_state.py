"""A peer's copy of the outer state: the weights and what else its method shares, changed only by a commit.

The next state is built slice by slice in another generation while results arrive, then hashed and voted on. A commit
puts it in the place of the current one. A discarded round leaves the current one untouched.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from optim.codecs import Buffer
from optim.strategies.interface import Coding, OuterStrategy, RoundInfo
from peer.checkpoint.generation import MemoryRoom, StateGeneration, StateRoom
from peer.checkpoint.hash_tree import StateTree, hash_state


class OuterState:
    """The current state and the next one.

    `current` holds [theta, *strategy.shared], each flat fp32, shape (P,), and their hash tree, whose root is the state
    hash.
    """

    def __init__(self, current: StateGeneration, strategy: OuterStrategy, room: StateRoom) -> None:
        """`room`: where later states lie. Blocks for a pass over the state if its hash tree is not known."""
        if len(current.vectors) != 1 + len(strategy.shared):
            raise ValueError(f"the method shares {1 + len(strategy.shared)} vectors, not {len(current.vectors)}")
        self.strategy = strategy
        self.current = current.hashed()
        self._whole_place: tuple[slice, ...] = (slice(0, current.numel),)
        self._room = room
        self.changed: tuple[slice, ...] = self._whole_place
        """The slices that the last commit changed."""
        self._next: StateGeneration | None = None
        self._next_tree: StateTree | None = None
        self._is_unchanged = False  # whether the next state is the current one
        self._apart: tuple[slice, ...] = self._whole_place  # where what is built may differ from the current state
        self._before: weakref.ref[torch.Tensor] | None = None  # the weights of the state before the current one
        self._whole: torch.Tensor | None = None  # the merged update, for a method that steps on all of it at once
        self._round_info: RoundInfo | None = None
        self._coding: Coding | None = None

    @classmethod
    def in_memory(cls, tensors: Sequence[torch.Tensor], strategy: OuterStrategy) -> OuterState:
        """Begin with [theta, *strategy.shared]; later states lie in memory."""
        current = StateGeneration(dict(zip(("theta", *strategy.shared), tensors, strict=True)))
        return cls(current, strategy, MemoryRoom(current.vectors, current.numel))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self.current.tensors.values())

    @property
    def tree(self) -> StateTree:
        return self.current.tree

    @property
    def theta(self) -> torch.Tensor:
        return self.current.tensors["theta"]

    @property
    def numel(self) -> int:
        return self.current.numel

    @property
    def size_bytes(self) -> int:
        return self.current.size_bytes

    @property
    def next_hash(self) -> bytes:
        """The hash of the complete next state; empty while there is none."""
        return self._next_tree.root if self._next_tree is not None else b""

    def begin(self, round_info: RoundInfo, coding: Coding) -> None:
        """Begin to build the state after that round from the current one. Drops one that was begun before. Raises
        ResourceError if there is no room for it."""
        self._next_tree = None
        self._round_info, self._coding = round_info, coding
        if not self.strategy.elementwise and self._whole is None:
            self._whole = self._room.vector(self.numel)
        after, self._is_unchanged = self._begun(), False
        if sum(place.stop - place.start for place in coding.places) < self.numel:
            for place in self._apart:
                for mine, before in zip(after, self.tensors, strict=True):
                    mine[place] = before[place]
        self._apart = coding.places

    def _begun(self) -> list[torch.Tensor]:
        """Return the vectors that the next state is built in. They differ from the current state in `_apart`."""
        if self._next is None:
            self._next = self._room.new()
            if self._before is None or self._next.tensors["theta"] is not self._before():
                self._apart = self._whole_place
        return list(self._next.tensors.values())

    def build(self, index: int, result: Buffer) -> None:
        """Apply one slice's merged update; `ProtocolViolation` if it does not decode."""
        assert self._coding is not None and self._round_info is not None
        self._next_tree = None
        after = self._begun()
        if self._whole is None:
            self.strategy.apply(self._round_info, self._coding, index, result, after, self.tensors)
            return
        for place, update in self._coding.updates(index, result):
            self._whole[place] = update

    def hash_next(self) -> bytes:
        """Hash the complete next state, for the vote. Every slice must have been built."""
        after = self._begun()
        if self._whole is not None:
            assert self._round_info is not None
            self.strategy.step_into(self._round_info, after, self.tensors, self._whole)
        self._next_tree = hash_state(after)
        return self._next_tree.root

    def hash_unchanged(self) -> bytes:
        """Make the current state the next one as well, instead of building slices. Return its hash."""
        self._next_tree, self._is_unchanged = self.tree, True
        return self.tree.root

    def commit(self, state_hash: bytes) -> None:
        """Make the next state current. Its hash must be `state_hash`."""
        if self._next_tree is None or self._next_tree.root != state_hash:
            raise RuntimeError("only the hashed next state can be committed")
        if self._is_unchanged:
            self.changed = ()
        else:
            assert self._next is not None
            self._before = weakref.ref(self.theta)
            self._next.finish(self._next_tree)
            self.current, self._next, self.changed = self._next, None, self._apart
        self._next_tree = None

    def replace(self, tensors: Sequence[torch.Tensor], tree: StateTree) -> None:
        """Take over a state that was fetched from other peers. Its vectors must not change any more."""
        self.current, self._next_tree = (
            StateGeneration(dict(zip(self.current.vectors, tensors, strict=True)), tree),
            None,
        )
        self._before, self._apart, self.changed = None, self._whole_place, self._whole_place
