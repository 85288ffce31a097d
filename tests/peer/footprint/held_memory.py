"""What torch has allocated and still holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldMemory(TorchDispatchMode):
    """Inside the block it notes the storage of every tensor that an operation returns. Autograd keeps many of them
    where Python does not see them, so each is asked whether it lives."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self._given = {one.untyped_storage().data_ptr() for one in given}
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self.largest = 0
        """Elements of the largest tensor that was returned."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        self._made += [weakref.ref(one.untyped_storage()) for one in made]
        self.largest = max(self.largest, *(one.numel() for one in made), 0)
        return out

    @property
    def size_bytes(self) -> int:
        """The bytes of the storages that live, without those of the tensors that were given."""
        alive = [storage for ref in self._made if (storage := ref()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in alive}
        return sum(size for at, size in sizes.items() if at not in self._given)
