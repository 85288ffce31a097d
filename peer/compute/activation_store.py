"""Micro-batches between their forward and their backward: what is kept of them, and how much of it at most."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.errors import StageRefused
from peer.ipc.stage_spec import MicroBatch, PassKey


@dataclass
class HeldMicroBatch:
    """Input `x`, token ids (B, T) or hidden state (B, T, C), and on the last stage `targets` (B, T). `out` is the root
    of the autograd graph, None where the forward pass is to be computed anew; `graph_bytes` is what the graph keeps.
    `weights_epoch`: that of the weights it went forward with."""

    micro_batch: MicroBatch
    weights_epoch: int
    x: Tensor
    targets: Tensor | None
    out: Tensor | None = None
    graph_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        own = self.x.nbytes + (0 if self.targets is None else self.targets.nbytes)
        return own + (0 if self.out is None else self.graph_bytes)

    @property
    def shape(self) -> torch.Size:
        """(B, T)"""
        return self.x.shape[:2]


@dataclass
class ActivationStore:
    """At most `held_max` micro-batches and `held_max_bytes`, by the key of their pass. Refuses what is too much, never
    drops on its own account."""

    held_max: int
    held_max_bytes: int
    size_bytes: int = 0
    _held: dict[PassKey, HeldMicroBatch] = field(default_factory=dict)

    def __contains__(self, key: PassKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def is_to_count(self, id: str) -> bool:
        """Whether a pass of this micro-batch is held that is to be counted."""
        return any(held.micro_batch.id == id and held.micro_batch.count for held in self._held.values())

    def require_room(self, size_bytes: int) -> None:
        """Raises StageRefused ("full") where another micro-batch of this size has no place."""
        if len(self._held) >= self.held_max:
            raise StageRefused(f"{self.held_max} micro-batches await their backward: finish or drop one", "full")
        if self.size_bytes + size_bytes > self.held_max_bytes:
            raise StageRefused(
                f"activations of {self.size_bytes >> 10} KiB are held, {size_bytes >> 10} KiB more exceed the limit of "
                f"{self.held_max_bytes >> 10} KiB: finish or drop a micro-batch, recompute, or raise held_max_bytes",
                "full",
            )

    def add(self, held: HeldMicroBatch) -> None:
        """Raises StageRefused ("full")."""
        self.require_room(held.size_bytes)
        self._held[held.micro_batch.key] = held
        self.size_bytes += held.size_bytes

    def find(self, micro_batch: MicroBatch) -> HeldMicroBatch:
        """Raises StageRefused ("unknown", also for one to be counted whose forward was not; "epoch" where the forward
        was of another)."""
        held = self._held.get(micro_batch.key)
        if held is None or (micro_batch.count and not held.micro_batch.count):
            kind = "to be counted " if micro_batch.count else ""
            raise StageRefused(f"no micro-batch {micro_batch.id!r} {kind}is held: send its forward again", "unknown")
        if held.micro_batch.epoch != micro_batch.epoch:
            raise StageRefused(
                f"micro-batch {micro_batch.id!r} went forward in epoch {held.micro_batch.epoch}, "
                f"not {micro_batch.epoch}: send its forward again",
                "epoch",
            )
        return held

    def remove(self, key: PassKey) -> bool:
        """Whether there was one."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        self.size_bytes -= held.size_bytes
        return True

    def forget_graph(self, held: HeldMicroBatch) -> None:
        """Keep only its input."""
        self.size_bytes -= held.size_bytes
        held.out = None
        self.size_bytes += held.size_bytes

    def forget_graphs(self) -> None:
        """Of all: the weights they were computed with are gone."""
        for held in self._held.values():
            self.forget_graph(held)

    def remove_outside(self, epochs: Container[int | None]) -> tuple[str, ...]:
        """Remove the micro-batches of other epochs; their ids."""
        others = [key for key, held in self._held.items() if held.micro_batch.epoch not in epochs]
        for key in others:
            self.remove(key)
        return tuple(id for id, _ in others)


class GraphSize:
    """`size_bytes` of what autograd saved within `measured`, each storage once, parameters left out."""

    def __init__(self, weights: Tensor) -> None:
        self._storages: dict[int, int] = {}
        self._weights = weights.untyped_storage().data_ptr()

    @property
    def size_bytes(self) -> int:
        return sum(self._storages.values())

    @contextmanager
    def measured(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self._weights:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself, where it is an output, would keep its own graph alive for ever
