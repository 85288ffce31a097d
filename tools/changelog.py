"""Joins the fragments of `changes/` into CHANGELOG.md.

    python tools/changelog.py VERSION     at a release: a section of that version, dated today; the fragments go
    python tools/changelog.py --gather    when a folder is full: one fragment a kind, with the lines of all

A fragment is `changes/KIND/NAME.md`: one entry or a few, as they will stand in the changelog. A change that adds a file
meets no other change.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
KINDS: Final = ("added", "changed", "deprecated", "removed", "fixed", "security")
"""Of Keep a Changelog, in its order."""
GATHERED: Final = "gathered.md"
"""The fragment that others were gathered into: it comes first."""
UNRELEASED: Final = "## [Unreleased]\n"
RELEASED: Final = re.compile(r"^## \[(?!Unreleased)", re.MULTILINE)


class BadFragment(ValueError):
    """A file in `changes/` that cannot be joined; the message says why."""


def fragments(root: Path) -> dict[str, list[Path]]:
    """Return the fragments of each kind that has any, in the order in which they are joined. Raises BadFragment."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / "changes").rglob("*")):
        if path.is_dir():
            continue
        kind = path.parent.name
        if path.parent.parent != root / "changes" or kind not in KINDS or path.suffix != ".md":
            raise BadFragment(f"{path} is no fragment: name it changes/KIND/NAME.md, KIND one of {', '.join(KINDS)}")
        found.setdefault(kind, []).append(path)
    return {kind: sorted(found[kind], key=_place) for kind in KINDS if kind in found}


def _place(path: Path) -> tuple[bool, str]:
    return path.name != GATHERED, path.name


def entries(path: Path) -> str:
    """Return what a fragment says: lines begin an entry with "- " or go on with two blanks. Raises BadFragment."""
    lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    for number, line in enumerate(lines, 1):
        if not line.startswith("- " if number == 1 else ("- ", "  ")) or not line[2:].strip():
            raise BadFragment(f'{path}:{number} is no line of an entry: begin it with "- ", go on with two blanks')
    return "\n".join(lines) + "\n"


def released(page: str, root: Path, version: str, date: datetime.date) -> str:
    """Return the changelog with a section of this version, of all fragments. Raises BadFragment."""
    kinds = [
        f"### {kind.capitalize()}\n\n{''.join(map(entries, paths))}" for kind, paths in fragments(root).items()
    ]  # fmt: skip
    if UNRELEASED not in page or not kinds:
        raise BadFragment(
            f"there is nothing to release: changes/ is empty, or CHANGELOG.md has no {UNRELEASED.strip()}"
        )
    section = f"## [{version}] - {date.isoformat()}\n\n" + "\n".join(kinds)
    before = RELEASED.search(page)
    if before is None:
        return page.rstrip() + "\n\n" + section
    return page[: before.start()] + section + "\n" + page[before.start() :]


def release(root: Path, version: str, date: datetime.date) -> None:
    """Write the section of a version, and remove the fragments."""
    page = root / "CHANGELOG.md"
    page.write_text(released(page.read_text(encoding="utf-8"), root, version, date), encoding="utf-8")
    for paths in fragments(root).values():
        for path in paths:
            path.unlink()


def gather(root: Path) -> None:
    """Join the fragments of each kind into one."""
    for kind, paths in fragments(root).items():
        text = "".join(map(entries, paths))
        for path in paths:
            path.unlink()
        (root / "changes" / kind / GATHERED).write_text(text, encoding="utf-8")


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description="Join the fragments of changes/ into CHANGELOG.md.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", help="the version that is released")
    what.add_argument("--gather", action="store_true", help="make one fragment a kind, and release nothing")
    arguments = parser.parse_args()
    try:
        if arguments.gather:
            gather(ROOT)
        else:
            release(ROOT, arguments.version, datetime.date.today())
    except BadFragment as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
