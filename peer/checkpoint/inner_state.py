"""The inner optimizer's state of a worker group, in a file of the workers' private folder.

    inner_state              what a new worker begins with
    inner_state-meeting-...  being written by the group of that name; a group clears away those of earlier ones

A page of head comes first: what the state is of, its size, and a hash of it. Then the state as `InnerOptimizer.save`
writes it, in the order of the whole model (or stage), for any layout of ranks. One rename puts a complete file in the
place of the one before, so a worker that is killed at any moment leaves the old state or the new one, whole.

The state may be older than the weights that a new worker begins with. That does no harm: moments are means over the
last steps (some tens, and some hundreds, of AdamW), and a state from a few minutes ago is much nearer to them than zero
is. The same holds after a restart of the peer, so it continues with them, too.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from peer.bounds import Hash, Number
from peer.config import ModelConfig
from peer.decoding import MALFORMED
from peer.files import can_reserve, reserve
from peer.footprint.kept import INNER_STATE_S, SMALL_BYTES
from peer.ipc.span import Span

NAME: Final = "inner_state"
DROPPED: Final = "inner_state_dropped"
"""The event of a file that does not fit or is damaged, with the `reason`."""
UNSAVED: Final = "inner_state_unsaved"
"""The event of a file that could not be written, with the `reason`; once, until one is written again."""
_MAGIC: Final = b"barninn1"
HEAD_BYTES: Final = 4096  # a page: the state behind it is aligned
_PIECE_BYTES: Final = 4 << 20
_LOOK_S: Final = 1.0
Sum = Callable[[Sequence[float]], Sequence[float]]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    of: Hash
    size_bytes: Number
    digest: Hash


class Reporter(Protocol):
    """Takes the events of the file, and the heartbeats (`ticks`) of the worker while it is written."""

    ticks: int

    def emit(self, name: str, /, **fields: str | int | float | bool | None) -> None: ...


def identity_of(run: str, model: ModelConfig, span: Span, optimizer: str) -> bytes:
    """Return 32 bytes that name what a state is of. No state of another name may be taken."""
    return blake3(msgspec.msgpack.encode((run, model, span.first, span.end, optimizer))).digest()


class InnerStateFile:
    """A state of `size_bytes` in `folder`; `of` is its identity (`identity_of`).

    All ranks of a group call the same methods in the same order: `sum` adds up over them, `group` is a name of their
    own. A disk that fails or is full costs only the file: an event reports it, and training continues.
    """

    def __init__(
        self, folder: Path, group: str, of: bytes, size_bytes: int, rank: int, sum: Sum, reporter: Reporter
    ) -> None:
        self._path, self._part = folder / NAME, folder / f"{NAME}-{group}"
        self._of, self._size_bytes, self._rank = of, size_bytes, rank
        self._sum, self._reporter = sum, reporter
        self._saved_at = time.monotonic()
        self._is_refused = False  # the last attempt to write it failed

    def load(self, restore: Callable[[Tensor], None]) -> None:
        """Call `restore` with the state, uint8 (size_bytes,), where there is one that fits; the tensor is the mapped
        file. One that does not fit is removed."""
        if self._together(self._check):
            restore(self._mapped(self._path, mmap.ACCESS_COPY))

    def save_small(self, write: Callable[[Tensor], None]) -> None:
        """After each change of the state: write a file of it where that is no work. `write` fills a tensor of zeros,
        uint8 (size_bytes,), with what this rank has of the state."""
        if self._size_bytes <= SMALL_BYTES:
            self._save(write)

    def save_large(self, write: Callable[[Tensor], None]) -> None:
        """When there is time after a change: write a larger state, at most every `INNER_STATE_S`."""
        if self._size_bytes > SMALL_BYTES:
            is_due = self._rank == 0 and time.monotonic() - self._saved_at >= INNER_STATE_S
            if any(self._sum((is_due,))):
                self._save(write)

    def _save(self, write: Callable[[Tensor], None]) -> None:
        steps = (self._reserve, partial(self._fill, write), self._seal)
        if all(self._together(step) for step in steps):
            self._is_refused = False
        elif self._rank == 0:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def _together(self, work: Callable[[], bool]) -> bool:
        """Return whether `work` returns True at all ranks. With a large state they meet each second, and tick: none
        waits longer in a collective, nor is taken for hung, however slow a disk is. A small one takes no thread: where
        memory is short there may be no room for its stack."""
        if self._size_bytes <= SMALL_BYTES:
            return not any(self._sum((not work(),)))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work)
            while True:
                wait((future,), _LOOK_S)
                self._reporter.ticks += 1
                is_done = future.done()
                working, failed = self._sum((not is_done, is_done and not future.result()))
                if not working:
                    return not failed

    def _check(self) -> bool:
        """Return whether the file can be taken; the first rank looks for all."""
        if self._rank:
            return True
        for left in self._path.parent.glob(f"{NAME}-*"):
            with suppress(OSError):
                left.unlink()
        try:
            with open(self._path, "rb") as file:
                reason = self._fault_in(file)
        except FileNotFoundError:
            return False
        except OSError as error:
            reason = f"it cannot be read ({error.strerror})"
        if reason is None:
            return True
        with suppress(OSError):
            self._path.unlink()
        self._reporter.emit(DROPPED, reason=f"{reason}: the inner optimizer begins at zero")
        return False

    def _fault_in(self, file: BinaryIO) -> str | None:
        """Return why the file cannot be taken; None if it can. Raises OSError."""
        magic, head_bytes = file.read(len(_MAGIC)), file.read(HEAD_BYTES - len(_MAGIC))
        try:
            if magic != _MAGIC:
                raise ValueError
            head = msgspec.msgpack.decode(head_bytes.rstrip(b"\0"), type=_Head)
        except (ValueError, *MALFORMED):
            return "its head is damaged"
        if (head.of, head.size_bytes) != (self._of, self._size_bytes):
            return "it is of another run, model, stage or optimizer"
        if os.fstat(file.fileno()).st_size != HEAD_BYTES + self._size_bytes or self._digest(file) != head.digest:
            return "it is damaged"
        return None

    def _reserve(self) -> bool:
        """Make a file of zeros, with room for all of it: a write to a mapped file on a full disk would be the end of
        the process."""
        if self._rank:
            return True
        try:
            with open(self._part, "wb") as file:
                size = HEAD_BYTES + self._size_bytes
                if can_reserve():
                    reserve(file.fileno(), size)
                else:  # macOS
                    for at in range(0, size, _PIECE_BYTES):
                        file.write(bytes(min(_PIECE_BYTES, size - at)))
        except OSError as error:
            return self._refuse(error)
        return True

    def _fill(self, write: Callable[[Tensor], None]) -> bool:
        """Write what this rank has of the state; what is mapped is the file, no copy in memory."""
        try:
            state = self._mapped(self._part, mmap.ACCESS_WRITE)
        except OSError as error:
            return self._refuse(error)
        write(state)
        return True

    def _seal(self) -> bool:
        """Write the head, and put the file in its place."""
        if self._rank:
            return True
        try:
            with open(self._part, "r+b") as file:
                file.seek(HEAD_BYTES)
                head = msgspec.msgpack.encode(_Head(self._of, self._size_bytes, self._digest(file)))
                file.seek(0)
                file.write(_MAGIC + head)
                if self._size_bytes > SMALL_BYTES:  # else it is written often, and a cut costs no more than its moments
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(self._part, self._path)
        except OSError as error:
            return self._refuse(error)
        return True

    def _refuse(self, error: OSError) -> bool:
        if not self._is_refused:
            need = f"it takes {(2 * self._size_bytes >> 20) + 1} MiB there while it is written"
            reason = f"{self._path} cannot be written ({error.strerror}; {need}): free some space; training goes on"
            self._reporter.emit(UNSAVED, reason=reason)
        self._is_refused = True
        return False

    def _mapped(self, path: Path, access: int) -> Tensor:
        """Return the state in a file, which lives as long as the tensor. Raises OSError."""
        with open(path, "rb" if access == mmap.ACCESS_COPY else "r+b") as file:
            mapped = mmap.mmap(file.fileno(), HEAD_BYTES + self._size_bytes, access=access)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=HEAD_BYTES)

    @staticmethod
    def _digest(file: BinaryIO) -> bytes:
        """Hash the rest of a file in pieces. Raises OSError."""
        hasher, piece = blake3(), memoryview(bytearray(min(_PIECE_BYTES, os.fstat(file.fileno()).st_size)))
        while count := file.readinto(piece):  # type: ignore[attr-defined]  # not in the type, but in every file
            hasher.update(piece[:count])
        return hasher.digest()
