"""The encoded results of rounds on disk: from the last checkpoint they lead to every state that this peer has voted
for or committed since.

A result is a fraction of a state's size, so it can be on disk before a vote is sent; whole states are written seldom.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from peer.bounds import SLICES_MAX, Hash, Number
from peer.decoding import MALFORMED
from peer.errors import ResourceError
from peer.files import fsync_path, make_folder
from swarm.protocol.head import Head

HEADER_BYTES_MAX: Final = 8 << 20
_SUFFIX: Final = ".result"


class _Header(msgspec.Struct, frozen=True):
    before: Head
    """The head whose state the result was merged on."""
    leads_to: Hash
    sizes: Annotated[tuple[Number, ...], msgspec.Meta(max_length=SLICES_MAX)]


@dataclass(frozen=True)
class LoggedResult:
    """The encoded result of one round."""

    before: Head
    """The head before the round."""
    leads_to: bytes
    """The hash of the state after it."""
    parts: Sequence[memoryview]
    """Each slice's encoded result."""


class ResultLog:
    """The results of one replica, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, leads_to: bytes) -> Path:
        return self._folder / f"{leads_to.hex()[:40]}{_SUFFIX}"

    def has(self, leads_to: bytes) -> bool:
        return self._path(leads_to).exists()

    def write(self, result: LoggedResult) -> None:
        """Put a result on disk: file and folder are synced when this returns. Raises ResourceError."""
        path = self._path(result.leads_to)
        part = path.with_suffix(".part")
        header = msgspec.msgpack.encode(
            _Header(result.before, result.leads_to, tuple(part.nbytes for part in result.parts))
        )
        try:
            make_folder(self._folder)
            with part.open("wb") as file:
                file.write(len(header).to_bytes(4, "big") + header)
                for piece in result.parts:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            fsync_path(self._folder)
        except OSError as error:
            raise ResourceError(
                f"cannot write {path} ({error.strerror}): free some space or choose another --home"
            ) from error

    def load(self) -> dict[bytes, LoggedResult]:
        """Return all results that are whole, by the state that they lead to."""
        found: dict[bytes, LoggedResult] = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            result = _read(path)
            if result is not None:
                found[result.leads_to] = result
        return found

    def drop(self, until_round: int) -> None:
        """Forget the results that led to a state of that round or an earlier one: a checkpoint has it."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            header = _read_header(path)
            if header is None or header[0].before.round + 1 <= until_round:
                path.unlink(missing_ok=True)


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


def _read_header(path: Path) -> tuple[_Header, int] | None:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(4), "big")
            if size > HEADER_BYTES_MAX:
                return None
            return msgspec.msgpack.decode(file.read(size), type=_Header), 4 + size
    except (OSError, *MALFORMED):
        return None


def _read(path: Path) -> LoggedResult | None:
    found = _read_header(path)
    if found is None:
        return None
    header, start = found
    if path.stat().st_size != start + sum(header.sizes):
        return None
    view = memoryview(path.read_bytes())[start:]
    parts: list[memoryview] = []
    for size in header.sizes:
        parts.append(view[:size])
        view = view[size:]
    return LoggedResult(header.before, header.leads_to, parts)
