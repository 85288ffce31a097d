"""A node's records on disk: one file a key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from peer.errors import ResourceError
from peer.files import fsync_path, make_folder, read_bounded, write_atomically

RECORD_BYTES_MAX: Final = 8 << 20
_SUFFIX: Final = ".record"


class RecordFiles:
    """The records of one group's node, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> dict[str, bytes]:
        """Return all records, by key. One that cannot be read is damaged, which the node must know: it is empty."""
        found: dict[str, bytes] = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            key = path.name.removesuffix(_SUFFIX).replace("-", "/")
            try:
                found[key] = read_bounded(path, RECORD_BYTES_MAX)
            except OSError:
                found[key] = b""
        return found

    def write(self, records: Mapping[str, bytes]) -> None:
        """Put records on disk, in order: files and folder are synced when this returns. Raises ResourceError."""
        try:
            make_folder(self._folder)
            for key, record in records.items():
                write_atomically(self._folder / f"{key.replace('/', '-')}{_SUFFIX}", record)
            fsync_path(self._folder)
        except OSError as error:
            raise ResourceError(
                f"cannot write {self._folder} ({error.strerror}): free some space or choose another --home"
            ) from error
