"""Folders for what need not outlive a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from peer.errors import ResourceError


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that only we may read, and that is gone after the block. ResourceError if there can be none."""
    try:
        folder = TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ResourceError(
            f"no temporary folder can be made ({error.strerror}): free some space, or name another place in TMPDIR."
        ) from error
    with folder as path:
        yield Path(path)
