"""The checkpoints of one peer: saved during training, kept by a retention rule, loaded only if intact.

checkpoints/ 000006-round-00000011/    one checkpoint (`peer.checkpoint.checkpoint_file`); the first number is the order
of saving 000007-round-00000012/ .tmp-...                  being written or deleted; removed at the next start
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from peer.catalogue.machine import CheckpointFailed, CheckpointSaved, CheckpointSkipped
from peer.checkpoint.checkpoint_file import (
    MANIFEST,
    TEMPORARY,
    LoadedCheckpoint,
    describe,
    load_checkpoint,
    write_checkpoint,
)
from peer.checkpoint.generation import StateGeneration
from peer.errors import CheckpointError, ResourceError
from peer.events import EventLog
from peer.files import is_full, make_folder
from peer.footprint.kept import CHECKPOINTS
from peer.identity import Identity
from peer.model.layout import FlatLayout

_NAME: Final = re.compile(r"(\d{6,})-round-(\d{8,})")
_HEADROOM: Final = 1.2  # the free space needed for a save, in sizes of the state


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint on disk. `sequence` grows with every save, independent of the round."""

    sequence: int
    round: int
    path: Path


class CheckpointStore:
    """The checkpoints of one peer in one run, in one folder.

    A failing disk costs checkpoints, never training: `save` then returns False and an event names the remedy. Events:
    checkpoint_saved, _failed, _postponed (a save); _skipped (a load); _deleted.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        run_id: str,
        events: EventLog,
        keep_last: int = CHECKPOINTS,
        keep_every: int = 0,
    ) -> None:
        """Keep the newest `keep_last`, and each whose round is a multiple of `keep_every` (0: none)."""
        self._directory = directory
        self._identity = identity
        self._run_id = run_id
        self._events = events
        self._keep_last = max(1, keep_last)
        self._keep_every = keep_every
        self._saving = False
        self._corrupt: set[int] = set()

    def prepare(self) -> None:
        """Create the folder and remove unfinished folders of a killed process. Call it once, before the first save.

        Raises ResourceError if the folder cannot be written.
        """
        try:
            make_folder(self._directory)
            for orphan in self._directory.glob(f"{TEMPORARY}*"):
                shutil.rmtree(orphan)
            os.rmdir(tempfile.mkdtemp(dir=self._directory, prefix=TEMPORARY))
        except OSError as error:
            raise ResourceError(_sentence(error, self._directory)) from error

    def list(self) -> Sequence[CheckpointEntry]:
        """Return the checkpoints that have a manifest, oldest first. Only loading shows whether they are intact."""
        if not self._directory.is_dir():
            return []
        found = []
        for path in self._directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (path / MANIFEST).is_file():
                found.append(CheckpointEntry(int(match[1]), int(match[2]), path))
        return sorted(found, key=lambda entry: entry.sequence)

    async def save(self, round: int, head: bytes, state: StateGeneration, layout: FlatLayout) -> bool:
        """Write a checkpoint of a state, in a thread. Returns whether a new checkpoint is on disk. While an earlier one
        is being written, a new one is skipped, not queued.
        """
        if self._saving:
            reason = "the previous one is still being written"
            self._events.emit("checkpoint_postponed", round=round, reason=reason)
            return False
        self._saving = True
        try:
            return await trio.to_thread.run_sync(self._write, round, head, state, layout)
        finally:
            self._saving = False

    def load_latest(self) -> LoadedCheckpoint | None:
        """Return the newest intact checkpoint of this run, or None. Blocks, about 0.5 s a GB: call it in a thread.

        The signature of this peer, hashes and finiteness are checked. A checkpoint that fails is skipped with a
        checkpoint_skipped event.
        """
        for entry in reversed(self.list()):
            try:
                return load_checkpoint(entry.path, self._run_id, self._identity.peer_id)
            except CheckpointError as error:
                self._corrupt.add(entry.sequence)
                self._events.emit(CheckpointSkipped(path=str(entry.path), reason=str(error)))
        return None

    def _write(self, round: int, head: bytes, state: StateGeneration, layout: FlatLayout) -> bool:
        started = time.monotonic()
        manifest = describe(self._run_id, round, head, state, layout)
        size = manifest.tree.size_bytes
        while True:
            sequence = max((entry.sequence for entry in self.list()), default=0) + 1
            path = self._directory / f"{sequence:06}-round-{round:08}"
            try:
                if not state.files:
                    self._make_room(int(size * _HEADROOM))
                write_checkpoint(path, self._identity, manifest, state)
                break
            except (OSError, CheckpointError) as error:
                self._remove_temporary()
                if isinstance(error, OSError) and is_full(error) and self._delete_oldest("the disk is full"):
                    continue
                sentence = _sentence(error, self._directory) if isinstance(error, OSError) else str(error)
                reason = f"{sentence}; training continues without new checkpoints"
                self._events.emit(CheckpointFailed(round=round, reason=reason))
                return False
        self._retire()
        seconds = time.monotonic() - started
        self._events.emit(CheckpointSaved(round=round, path=str(path), size_bytes=size, seconds=seconds))
        return True

    def _make_room(self, wanted_bytes: int) -> None:
        """Delete old checkpoints, never the last intact one, until a new one fits. Raises OSError if it cannot fit."""
        while (free := shutil.disk_usage(self._directory).free) < wanted_bytes:
            if not self._delete_oldest("the disk is nearly full"):
                raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {(wanted_bytes >> 20) + 1} MiB needed")

    def _delete_oldest(self, reason: str) -> bool:
        corrupt = [entry for entry in self.list() if entry.sequence in self._corrupt]
        for entry in [*corrupt, *self._intact()[:-1]]:
            return self._delete(entry, reason)
        return False

    def _retire(self) -> None:
        """Apply the retention rule; corrupt checkpoints do not count among those to keep."""
        for entry in self._intact()[: -self._keep_last]:
            if self._keep_every == 0 or entry.round % self._keep_every != 0:
                self._delete(entry, "newer ones exist")

    def _intact(self) -> Sequence[CheckpointEntry]:
        return [entry for entry in self.list() if entry.sequence not in self._corrupt]

    def _delete(self, entry: CheckpointEntry, reason: str) -> bool:
        trash = entry.path.with_name(TEMPORARY + entry.path.name)
        try:
            entry.path.rename(trash)  # takes effect even if removing the files is interrupted
            shutil.rmtree(trash)
        except OSError as error:
            reason = f"an old checkpoint cannot be deleted: {_sentence(error, self._directory)}"
            self._events.emit(CheckpointFailed(round=entry.round, reason=reason))
            return False
        self._events.emit("checkpoint_deleted", round=entry.round, reason=reason)
        return True

    def _remove_temporary(self) -> None:
        for orphan in self._directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(orphan, ignore_errors=True)


def _sentence(error: OSError, directory: Path) -> str:
    """Return what is wrong with the folder, and the remedy."""
    if is_full(error):
        return f"the disk of {directory} is full ({error.strerror}): free some space or choose another --home"
    return f"the folder {directory} cannot be written ({error.strerror}): choose a writable --home"
