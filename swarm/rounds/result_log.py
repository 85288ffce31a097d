"""The encoded results of rounds on disk: from the last checkpoint they lead to every state that this peer has voted
for or committed since.

A result is a fraction of a state's size, so it can be on disk before a vote is sent; whole states are written seldom.
The bytes of a large one are staged while the state is hashed. A footer at their end then says to which state they lead.
A vote waits for one sync of them: the file was made before, and its entry in the folder is on disk already.
The node only names the state that a record needs (`Persist.state`): it holds no bytes, so they are kept here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkstemp
from threading import Lock
from typing import Annotated, Final

import msgspec

from peer.bounds import SLICES_MAX, Hash, Number
from peer.decoding import MALFORMED
from peer.files import fsync_path, make_folder, map_parts, unwritable, write_direct
from peer.footprint import kept
from swarm.protocol.head import Head
from swarm.rounds.exchange.spool_files import SpoolFiles

FOOTER_BYTES_MAX: Final = 8 << 20
_SUFFIX: Final = ".result"
STAGED_MAX: Final = 4
STAGED_BYTES: Final = 4 << 20
"""A result of fewer bytes is not staged, but written and synced once."""
_SIZE_BYTES: Final = 4  # of the footer's size, at the end of the file


class _Footer(msgspec.Struct, frozen=True):
    before: Head
    """The head whose state the result was merged on."""
    leads_to: Hash
    sizes: Annotated[tuple[Number, ...], msgspec.Meta(max_length=SLICES_MAX)]
    key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """As `LoggedResult.key`."""


@dataclass(frozen=True)
class LoggedResult:
    """The encoded result of one round."""

    before: Head
    """The head before the round."""
    leads_to: bytes
    """The hash of the state after it."""
    parts: Sequence[memoryview]
    """Each slice's encoded result."""
    key: bytes = b""
    """The exchange that it is of, under which others ask for it; empty if it came from another peer."""


class ResultLog:
    """The results of one replica, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: dict[bytes, Path] = {}  # the file of each result that is whole, by the state that it leads to
        self._begun: dict[bytes, Path] = {}  # the file of each result that is not, by its name
        self._spare: Path | None = None  # the file of the next result
        self._in_use: list[Path] = []  # what is written now: no drop removes it
        self._making = Lock()
        self.spool = SpoolFiles(folder).write
        """Write bytes into a file without a name, and return the parts as they lie there. Raises ResourceError."""

    def has(self, leads_to: bytes) -> bool:
        """Return whether a whole result that leads to that state was written or loaded."""
        return leads_to in self._whole

    def prepare(self) -> None:
        """Make the file of the next result. Raises ResourceError."""
        with self._making:
            self._spare = self._spare or self._new_file()

    def stage(self, name: bytes, parts: Sequence[memoryview]) -> None:
        """Bring the bytes of a large result to the disk while it is not known yet to which state it leads: `write` has
        to sync little more than the footer then. Raises ResourceError."""
        if sum(part.nbytes for part in parts) >= STAGED_BYTES:
            with self._file_of(name) as path, _writing(path):
                _write_body(path, parts)

    def write(self, result: LoggedResult, name: bytes) -> LoggedResult:
        """Put a result on disk, of which `stage` may have written the bytes under that name: it is synced when this
        returns. Return it, unless it is small, with the parts as they lie in the file: those in memory may
        go. Raises ResourceError."""
        sizes = tuple(part.nbytes for part in result.parts)
        footer = msgspec.msgpack.encode(_Footer(result.before, result.leads_to, sizes, result.key))
        footer += len(footer).to_bytes(_SIZE_BYTES, "big")
        with self._file_of(name) as path:
            with _writing(path):
                if not path.exists() or path.stat().st_size != sum(sizes):
                    _write_body(path, result.parts)
                with path.open("ab") as file:
                    file.write(footer)
                    file.flush()
                    os.fsync(file.fileno())
            self._whole[result.leads_to] = path
            self._begun.pop(name, None)
        if not kept.result_lies_in_a_file(sum(sizes)):
            return result
        with suppress(OSError), path.open("rb") as file:
            return replace(result, parts=map_parts(file, sizes)[1])
        return result  # too many files or maps: it stays in memory

    @contextmanager
    def _file_of(self, name: bytes) -> Iterator[Path]:
        """Give the file of a result that is not whole; its entry in the folder is on disk."""
        with self._making:
            path = self._begun.get(name)
            if path is None or not path.exists():
                path, self._spare = self._spare, None
                self._begun[name] = path = path if path is not None and path.exists() else self._new_file()
            self._in_use.append(path)
        try:
            yield path
        finally:
            with self._making:
                self._in_use.remove(path)

    def _new_file(self) -> Path:
        try:
            make_folder(self._folder)
            fd, path = mkstemp(_SUFFIX, dir=self._folder)
            os.close(fd)
            fsync_path(self._folder)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        return Path(path)

    def load(self) -> dict[bytes, LoggedResult]:
        """Return all results that are whole, by the state that they lead to."""
        found: dict[bytes, LoggedResult] = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            result = _read(path)
            if result is not None:
                found[result.leads_to], self._whole[result.leads_to] = result, path
        return found

    def forget(self, leads_to: bytes) -> None:
        """Forget a result that is damaged."""
        path = self._whole.pop(leads_to, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def drop(self, until_round: int) -> None:
        """Forget the results that led to a state of that round or an earlier one: a checkpoint has it. Forget what was
        staged in vain, too."""
        staged: list[Path] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime):
            footer = _read_footer(path)
            if footer is None:
                staged.append(path)
            elif footer.before.round + 1 <= until_round:
                path.unlink(missing_ok=True)
                self._whole.pop(footer.leads_to, None)
        with self._making:
            for path in staged[:-STAGED_MAX]:
                if path not in (self._spare, *self._in_use):
                    path.unlink(missing_ok=True)
            self._begun = {name: path for name, path in self._begun.items() if path.exists()}


def reachable(results: Mapping[bytes, LoggedResult], state_hash: bytes) -> list[bytes]:
    """Return the hashes of the states that results lead to from one, that one first."""
    found, fresh = [state_hash], [state_hash]
    while fresh:
        name = fresh.pop()
        led = [to for to, result in results.items() if result.before.state_hash == name and to not in found]
        found += led
        fresh += led
    return found


def path_between(results: Mapping[bytes, LoggedResult], state_hash: bytes, goal: bytes) -> list[LoggedResult]:
    """Return the results that lead from one state to another, in order; none if there is no way."""
    path: list[LoggedResult] = []
    while goal != state_hash:
        if goal not in results or len(path) > len(results):
            return []
        path.append(results[goal])
        goal = results[goal].before.state_hash
    return path[::-1]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def _write_body(path: Path, parts: Sequence[memoryview]) -> None:
    """Write all but the footer, without a sync. A large result is seldom read again, so it goes past the system's
    cache."""
    with path.open("wb") as file:
        is_large = sum(part.nbytes for part in parts) >= STAGED_BYTES
        here = write_direct(path, parts) if is_large else 0
        file.seek(here)
        for part in parts:
            file.write(part[min(here, part.nbytes) :])
            here -= min(here, part.nbytes)


def _read_footer(path: Path) -> _Footer | None:
    """Return what a file says of its result; None if it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _SIZE_BYTES))
            length = int.from_bytes(file.read(_SIZE_BYTES), "big")
            if length > min(FOOTER_BYTES_MAX, size - _SIZE_BYTES):
                return None
            file.seek(size - _SIZE_BYTES - length)
            footer = msgspec.msgpack.decode(file.read(length), type=_Footer)
    except (OSError, *MALFORMED):
        return None
    return footer if sum(footer.sizes) + length + _SIZE_BYTES == size else None


def _read(path: Path) -> LoggedResult | None:
    footer = _read_footer(path)
    if footer is None:
        return None
    with path.open("rb") as file:
        # the results on disk can be many times the state's size together: nothing is read before it is used
        return LoggedResult(footer.before, footer.leads_to, map_parts(file, footer.sizes)[1], footer.key)
