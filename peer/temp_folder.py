"""Folders that last as long as a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.errors import ResourceError


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Open a folder that only this user may read; it is removed after the block. Raises ResourceError."""
    try:
        folder = TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ResourceError(
            f"no temporary folder can be made ({error.strerror}): free some space, or name another folder in TMPDIR"
        ) from error
    with folder as path:
        yield Path(path)
