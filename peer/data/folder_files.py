"""The files of a folder that hold text: chosen by their names, without opening one. The others are counted by kind.

A user's folder also holds files that tools keep beside the text: copies, caches, histories. Their names say so. They
are passed over below the folder that the user names, not above it or in its own name.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peer.data.packed_files import TEXT, suffixes_of

TOOL_FOLDERS: Final = frozenset(
    {"__pycache__", "node_modules", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir"}
)
"""Names that tools give to folders of their own."""
NO_SUFFIX: Final = "without a suffix"
_SUFFIX_CHARS_MAX: Final = 12


@dataclass(frozen=True)
class TextSource:
    """A folder of text, or a file."""

    root: Path
    suffixes: frozenset[str]
    """Of files that are read, in lower case."""
    passed_over: frozenset[str]
    """Names of subfolders that are not looked into."""
    is_users: bool
    """Whether the user named it: hidden files are then passed over, and each file that is not read is counted."""
    field: str = TEXT
    """The field that holds the text in a JSON or .parquet file."""


@dataclass(frozen=True)
class FoundFile:
    """A regular file with a suffix of text."""

    key: bytes
    """Its path relative to the folder, in the file system's bytes: names need not be UTF-8."""
    path: Path
    size_bytes: int
    identity: tuple[int, int]
    """Equal for two names of one file: links, also hard ones."""


def find_files(source: TextSource, skipped: Counter[str] | None = None) -> Iterator[FoundFile]:
    """Yield each regular file with a suffix of text, in no order; `skipped` counts the others by kind. Links to files
    are followed, links to folders are not."""
    counts = Counter[str]() if skipped is None else skipped
    for folder, subfolders, names in _walk(source.root, _counting(counts)):
        for name in [*subfolders]:
            if kind := _passed_over(source, folder, name):
                subfolders.remove(name)
                if source.is_users and skipped is not None:
                    skipped.update(_inside(kind, Path(folder, name)))
        for name in names:
            path = Path(folder, name)
            suffix, packing = suffixes_of(path)
            if source.is_users and name.startswith(".") and path != source.root:
                counts["hidden"] += 1
            elif suffix not in source.suffixes or (packing and not source.is_users):
                if source.is_users:
                    counts[_shown(path.suffix.lower())] += 1
            else:
                yield from _regular(source.root, path, counts)


def _passed_over(source: TextSource, folder: str, name: str) -> str:
    """Return the kind of what is in a subfolder that is not looked into, "" for one that is."""
    if source.is_users and name.startswith("."):
        return "in hidden folders"
    if name in source.passed_over:
        return "in folders of tools"
    return "link to a folder" if os.path.islink(os.path.join(folder, name)) else ""


def _inside(kind: str, folder: Path) -> Counter[str]:
    """Return the count of all files in a folder that is not looked into; a link counts as one."""
    if folder.is_symlink():
        return Counter({"link to a folder": 1})
    counts = Counter[str]()
    for at, subfolders, names in os.walk(folder, onerror=_counting(counts)):
        counts[kind] += len(names) + sum(os.path.islink(os.path.join(at, name)) for name in subfolders)
    return +counts


def _counting(counts: Counter[str]) -> Callable[[OSError], None]:
    def unreadable(error: OSError) -> None:
        counts["unreadable folder"] += 1

    return unreadable


def _regular(root: Path, path: Path, counts: Counter[str]) -> Iterator[FoundFile]:
    try:
        found = path.stat()
    except OSError:  # a link to nowhere or in a circle, or just deleted
        counts["unreadable"] += 1
        return
    if not stat.S_ISREG(found.st_mode):
        counts["not regular"] += 1
        return
    key = path.relative_to(root).as_posix() if path != root else path.name
    yield FoundFile(os.fsencode(key), path, found.st_size, (found.st_dev, found.st_ino))


def _walk(root: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
    if root.is_dir():
        yield from os.walk(root, onerror=onerror)
    else:
        yield str(root.parent), [], [root.name]


def _shown(suffix: str) -> str:
    """Return an unknown suffix as the account names it."""
    shown = os.fsencode(suffix).decode(errors="replace")
    return shown[:_SUFFIX_CHARS_MAX] if shown.isprintable() and shown else NO_SUFFIX
