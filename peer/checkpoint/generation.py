"""States of a replica, and where they lie: in memory, or in files that memory only caches.

A generation is written once. From then on it is only read, and it lasts for as long as anything refers to it: the
replica whose state it is, those that read it for a joiner, a checkpoint that is being written. So no reader copies it
or holds up a round. The next state gets another one from the same room.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from peer.checkpoint.hash_tree import StateTree, hash_state
from peer.checkpoint.mapped_floats import FLOAT_BYTES, floats_on_disk
from peer.checkpoint.safetensors_file import create_shard, plan_shards
from peer.errors import ResourceError
from peer.files import is_full
from peer.footprint import kept
from peer.model.layout import FlatLayout

PIECE_BYTES: Final = 4 << 20


class StateGeneration:
    """Flat fp32 vectors of one shape (P,), on the CPU; of a state, once they are written."""

    def __init__(
        self, tensors: Mapping[str, Tensor], tree: StateTree | None = None, files: Mapping[str, Path] | None = None
    ) -> None:
        """`tensors`: "theta" and others. `tree`: their hash tree, if it is known. `files`: where each vector lies, with
        a header as in a checkpoint, if in files of its own."""
        self.tensors: Final = dict(tensors)
        self.files: Final = dict(files or {})
        self._tree = tree

    @property
    def vectors(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def numel(self) -> int:
        return next(iter(self.tensors.values())).numel()

    @property
    def size_bytes(self) -> int:
        return FLOAT_BYTES * self.numel * len(self.tensors)

    def hashed(self) -> StateGeneration:
        """Return this generation, once its tree is known."""
        assert self.tree.hashes
        return self

    @property
    def tree(self) -> StateTree:
        """The hash tree. Blocks for a pass over the state if it was not known."""
        if self._tree is None:
            self._tree = hash_state(list(self.tensors.values()))
        return self._tree

    def finish(self, tree: StateTree) -> None:
        """Note that the vectors are written: they do not change any more, and this is their hash tree."""
        self._tree = tree

    def pieces(self, vector: str, place: slice) -> Iterator[memoryview]:
        """Yield the bytes of one vector at `place`, a piece at a time."""
        view = memoryview(self.tensors[vector][place].numpy().view("u1").data)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


class StateRoom(Protocol):
    """Where the states of one replica lie."""

    def new(self) -> StateGeneration:
        """Return vectors to write the next state to; what they hold is undefined. Raises ResourceError if there is no
        room."""
        ...

    def vector(self, numel: int) -> Tensor:
        """Return fp32 zeros, (numel,), for what a method keeps beside the state, until nothing refers to them. Raises
        ResourceError if there is no room."""
        ...


class MemoryRoom:
    """Keeps two states in memory, and small ones all. Where more are needed, as joiners read them, the others lie in
    files of `folder` without a name, if it is given and its disk has room."""

    def __init__(self, vectors: Sequence[str], numel: int, folder: Path | None = None, in_memory: int = 2) -> None:
        self._vectors, self._numel, self._folder, self._in_memory = tuple(vectors), numel, folder, in_memory
        self._free: deque[dict[str, Tensor]] = deque()  # filled by the garbage collector, in any thread: no lock
        self._made = 0

    def new(self) -> StateGeneration:
        with suppress(IndexError):
            return self._recycled(self._free.popleft())
        size_bytes = FLOAT_BYTES * self._numel * len(self._vectors)
        if self._made >= self._in_memory and self._folder is not None and kept.snapshots_lie_in_files(size_bytes):
            with suppress(OSError):
                found = floats_on_disk(self._folder, [self._numel] * len(self._vectors))
                return StateGeneration(dict(zip(self._vectors, found, strict=True)))
        self._made += 1
        return self._recycled({vector: torch.empty(self._numel) for vector in self._vectors})

    def vector(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.float32)

    def _recycled(self, tensors: dict[str, Tensor]) -> StateGeneration:
        """Return a generation whose vectors are free again when nothing refers to it."""
        generation = StateGeneration(tensors)
        weakref.finalize(generation, self._free.append, tensors)
        return generation


class FileRoom:
    """Keeps each state in files of its own: safetensors, with the flat vector from a page's border on, so that any
    program can read them and a checkpoint is a second name of them. The room on disk is reserved before it is used."""

    def __init__(self, vectors: Sequence[str], layout: FlatLayout, folder: Path) -> None:
        """Remove what a killed process has left in `folder`. Raises ResourceError if it cannot be written."""
        self._shards = plan_shards(layout, vectors)
        self._slots, self._folder = layout.slots, folder
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._refused(error) from error

    def new(self) -> StateGeneration:
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            tensors = {shard.vector: create_shard(folder, shard, self._slots) for shard in self._shards}
        except OSError as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise self._refused(error) from error
        generation = StateGeneration(tensors, files={shard.vector: folder / shard.file for shard in self._shards})
        weakref.finalize(generation, shutil.rmtree, folder, ignore_errors=True)
        return generation

    def vector(self, numel: int) -> Tensor:
        try:
            return floats_on_disk(self._folder, [numel])[0]
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> ResourceError:
        if is_full(error):
            need = sum(FLOAT_BYTES * self._slots[name].numel for shard in self._shards for name in shard.names)
            return ResourceError(
                f"the disk of {self._folder} is full, {(need >> 20) + 1} MiB are needed for the next state: free some"
                " space, then join again"
            )
        return ResourceError(
            f"the state cannot lie in {self._folder} ({error.strerror}): choose another --home, or --state memory"
        )
