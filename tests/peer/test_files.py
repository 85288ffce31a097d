"""Atomic writes and bounded reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peer.errors import ResourceError
from peer.files import read_bounded, write_atomically


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for content in (b"one", b"two"):
        write_atomically(path, content)
        assert path.read_bytes() == content and list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(ResourceError, match=r"cannot write .*free some space or choose another --home$"):
        write_atomically(tmp_path / "file", b"one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_bounded_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bounded(path, 4)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer would hold the process, beyond SIGTERM."""
    path = tmp_path / "file"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(OSError, match=r"regular file|[Ii]s a directory"):
        read_bounded(path, 4)
