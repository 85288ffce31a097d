"""Micro-batches that are held between their forward and their backward, within limits."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peer.errors import StageRefused
from peer.ipc.stage_spec import MicroBatch, PassKey


@dataclass
class HeldMicroBatch:
    """A micro-batch that awaits its backward."""

    micro_batch: MicroBatch
    weights_epoch: int
    """The epoch of the weights that it went forward with."""
    x: Tensor
    """Token ids (B, T) or the hidden state (B, T, C)."""
    targets: Tensor | None
    """(B, T), on the last stage."""
    own: int
    """The first rows of these: those that are this rank's own. The others count for nothing."""
    batch: int
    """The rows that all ranks have together."""
    samples: Tensor | None = None
    """The number of the sample in each row (B,), on the CPU; None where nothing is dropped."""
    root: Tensor | None = None
    """The root of the autograd graph; None if the backward repeats the forward."""
    graph_bytes: int = 0
    """The memory that the graph keeps."""

    @property
    def size_bytes(self) -> int:
        own = self.x.nbytes + (0 if self.targets is None else self.targets.nbytes)
        return own + (0 if self.root is None else self.graph_bytes)

    @property
    def shape(self) -> torch.Size:
        """Of all ranks' rows: their number, and T."""
        return torch.Size((self.batch, self.x.shape[1]))

    def seed(self, root: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the gradient that the backward begins with at `root`: that of the rows' output, or (None) ones. A rank
        without rows of its own counts for nothing."""
        if gradient is None:
            return torch.full_like(root, float(self.own > 0))
        return gradient.to(root.device)

    @property
    def counted_targets(self) -> Tensor | None:
        """Those of its own rows, one at least."""
        return None if self.targets is None else self.targets[: max(1, self.own)]


@dataclass
class ActivationStore:
    """Holds at most `held_max` micro-batches and `held_max_bytes`, by the key of their pass. It refuses more, and never
    drops what it holds."""

    held_max: int
    held_max_bytes: int
    size_bytes: int = 0
    _held: dict[PassKey, HeldMicroBatch] = field(default_factory=dict)

    def __contains__(self, key: PassKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def is_to_count(self, id: str) -> bool:
        """Whether a pass of this micro-batch is held that counts."""
        return any(held.micro_batch.id == id and held.micro_batch.count for held in self._held.values())

    def require_room(self, size_bytes: int) -> None:
        """Raise StageRefused ("full") if another micro-batch of this size does not fit."""
        if len(self._held) >= self.held_max:
            raise StageRefused(f"{self.held_max} micro-batches await their backward: finish or drop one", "full")
        if self.size_bytes + size_bytes > self.held_max_bytes:
            raise StageRefused(
                f"activations of {self.size_bytes >> 10} KiB are held, {size_bytes >> 10} KiB more exceed the limit of "
                f"{self.held_max_bytes >> 10} KiB: finish or drop a micro-batch, recompute, or raise held_max_bytes",
                "full",
            )

    def add(self, held: HeldMicroBatch) -> None:
        """Hold a micro-batch. Raises StageRefused ("full")."""
        self.require_room(held.size_bytes)
        self._held[held.micro_batch.key] = held
        self.size_bytes += held.size_bytes

    def find(self, micro_batch: MicroBatch) -> HeldMicroBatch:
        """Return the held micro-batch. Raises StageRefused: "unknown", also for one that counts if its forward did not;
        "epoch" if the forward was of another epoch."""
        held = self._held.get(micro_batch.key)
        if held is None or (micro_batch.count and not held.micro_batch.count):
            kind = "that counts " if micro_batch.count else ""
            raise StageRefused(f"no micro-batch {micro_batch.id!r} {kind}is held: send its forward again", "unknown")
        if held.micro_batch.epoch != micro_batch.epoch:
            raise StageRefused(
                f"micro-batch {micro_batch.id!r} went forward in epoch {held.micro_batch.epoch}, "
                f"not {micro_batch.epoch}: send its forward again",
                "epoch",
            )
        return held

    def remove(self, key: PassKey) -> bool:
        """Drop a micro-batch; returns whether it was held."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        self.size_bytes -= held.size_bytes
        return True

    def forget_graph(self, held: HeldMicroBatch) -> None:
        """Keep only the input of a micro-batch."""
        self.size_bytes -= held.size_bytes
        held.root = None
        self.size_bytes += held.size_bytes

    def forget_graphs(self) -> None:
        """Keep only the inputs: the weights of the graphs have changed."""
        for held in self._held.values():
            self.forget_graph(held)

    def remove_outside(self, epochs: Container[int | None]) -> tuple[str, ...]:
        """Drop the micro-batches of other epochs and return their ids."""
        others = [key for key, held in self._held.items() if held.micro_batch.epoch not in epochs]
        for key in others:
            self.remove(key)
        return tuple(id for id, _ in others)


class GraphSize:
    """Measures the bytes that autograd saves within `measured`: each storage once, without parameters."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._storages: dict[int, int] = {}
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in weights}

    @property
    def size_bytes(self) -> int:
        return sum(self._storages.values())

    @contextmanager
    def measured(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output saved as it is would keep its own graph alive
