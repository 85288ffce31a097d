"""States that were fetched whole, on disk until a checkpoint covers them: no results lead there from what is older, and
what this peer votes for next is built on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import trio

from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.mapped_floats import map_floats
from peer.errors import ResourceError
from peer.events import EventLog
from swarm.state.fetch import Fetched, StateFiles

_SUFFIX: Final = ".state"


class FetchedStates:
    """The fetched states of one replica, in `fetched/` below its folder: flat fp32, named by their hash.

    Most homes have none. For a moment there is one more than those that count, while the next one takes its place.
    """

    def __init__(self, folder: Path, size_bytes: int, vectors: int) -> None:
        """`size_bytes`: of a state, which is `vectors` vectors of one length."""
        self.part_file: Final = folder / "state.part"
        """Where a state arrives."""
        self._folder, self._size_bytes, self._vectors = folder / "fetched", size_bytes, vectors
        self.base = b""
        """The hash of the state here from which results lead to the committed one; empty if that is a checkpoint."""
        self._arriving = 0
        self._may_hold = True  # False once it is known that none is there, as in most homes: then no commit looks

    def path_of(self, state_hash: bytes) -> Path:
        """Return where a state is kept."""
        return self._folder / f"{state_hash.hex()}{_SUFFIX}"

    @contextmanager
    def arriving(self, state_hash: bytes) -> Iterator[StateFiles]:
        """Return where a state may arrive inside the block."""
        self._arriving += 1
        try:
            yield StateFiles(self.part_file, self.path_of(state_hash))
        finally:
            self._arriving -= 1
            self._may_hold = True

    def load(self, events: EventLog) -> list[Fetched]:
        """Return the states here, the latest first, mapped from their files. One that is damaged is removed, with an
        event."""
        found: list[Fetched] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime_ns):
            try:
                if path.stat().st_size != self._size_bytes:
                    raise ResourceError(f"{path} is not of the size of a state")
                tensors = map_floats(path, self._size_bytes).chunk(self._vectors)
                tree = hash_state(tensors)
                if path != self.path_of(tree.root):
                    raise ResourceError(f"{path} does not have the hash that it is named by")
                found.append(Fetched(tensors, tree, {}, self._size_bytes, 0.0))
            except (OSError, RuntimeError, ResourceError) as error:
                path.unlink(missing_ok=True)
                events.emit("fetched_state_damaged", reason=str(error))
        self._may_hold = bool(found)
        return found

    async def committed(self, state_hash: bytes, goal: bytes) -> None:
        """Note that this replica is at a state and has recorded so on disk. Remove states that do not lead there,
        except for `goal`, the node's next one."""
        if self._may_hold or self._arriving:
            stays, self._may_hold = True, False  # what arrives during the look sets it again
            try:
                stays = await trio.to_thread.run_sync(self._remove_others, state_hash, goal)
            finally:
                self._may_hold |= stays

    def _remove_others(self, state_hash: bytes, goal: bytes) -> bool:
        """Do as `committed` says; return whether any state stays."""
        if self.path_of(state_hash).exists():
            self.base = state_hash
        kept = {self.path_of(name) for name in (self.base, goal) if name}
        stays = False
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path in kept:
                stays = True
            else:
                path.unlink(missing_ok=True)
        return stays

    def release(self, base: bytes) -> None:
        """Remove what was `base` when a checkpoint began that is on disk now."""
        if base:
            self.path_of(base).unlink(missing_ok=True)
        if base == self.base:
            self.base = b""
