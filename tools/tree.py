"""Prints the tree of the repository: folders, git-tracked files, lines, and what each folder is for.

`python tools/tree.py --write` updates the tree in CONTRIBUTING.md between its markers. Descriptions are kept;
describe a new folder there by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "CONTRIBUTING.md"
ROOMS: Final = ("cli", "swarm", "optim", "dht", "peer", "tests", "benchmarks", "docs", "tools")
MARKED: Final = re.compile(r"(<!-- tree -->\n```\n)(.*?)(```\n<!-- /tree -->)", re.DOTALL)
UNKNOWN: Final = "?"


class Folder(NamedTuple):
    """One folder without its subfolders; of tests, with them."""

    name: str
    files: int
    lines: int
    """Rounded to hundreds."""


def folders() -> list[Folder]:
    """Count the git-tracked text files of each folder, parents before children."""
    tracked = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes: defaultdict[Path, list[int]] = defaultdict(list)
    for name in tracked.splitlines():
        path = ROOT / name
        folder = Path(name).parent
        if folder.parts[0] == "tests":
            folder = Path(*folder.parts[:2])
        if path.exists():
            sizes[folder].append(path.read_bytes().count(b"\n"))
    order = {room: place for place, room in enumerate(ROOMS)}
    ordered = sorted(sizes, key=lambda folder: (order[folder.parts[0]], folder.parts))
    return [Folder(f"{folder}/", len(sizes[folder]), round(sum(sizes[folder]), -2)) for folder in ordered]


def written(page: str) -> dict[str, str]:
    """Return the descriptions by folder, as they stand in the page."""
    found = MARKED.search(page)
    rows = found[2].splitlines()[1:] if found else []
    return {row.split()[0]: re.split(r"\s{2,}", row.strip(), maxsplit=3)[3] for row in rows}


def tree(descriptions: dict[str, str]) -> str:
    """Return the tree as text: one line a folder."""
    rows = folders()
    width = max(len(row.name) for row in rows)
    lines = [f"{'folder':<{width}}  files   lines  what it is for"]
    for row in rows:
        lines.append(f"{row.name:<{width}}  {row.files:>5}  {row.lines:>6}  {descriptions.get(row.name, UNKNOWN)}")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Return the page with a true tree."""
    text = tree(written(page))
    return MARKED.sub(lambda found: found[1] + text + found[3], page)


def main() -> None:
    """Print the tree, or write it to CONTRIBUTING.md."""
    page = PAGE.read_text()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(updated(page))
    else:
        sys.stdout.write(tree(written(page)))


if __name__ == "__main__":
    main()
