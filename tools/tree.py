"""Prints the tree of the repository: its folders, and what each is for.

`python tools/tree.py --write` updates the tree in CONTRIBUTING.md between its markers. A package is described by the
first line of its `__init__.py`. The line of another folder is kept; describe a new one there by hand.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "CONTRIBUTING.md"
ROOMS: Final = ("cli", "swarm", "optim", "dht", "peer", "tests", "benchmarks", "docs", "tools")
MARKED: Final = re.compile(r"(<!-- tree -->\n```\n)(.*?)(```\n<!-- /tree -->)", re.DOTALL)
UNKNOWN: Final = "?"


def folders() -> list[str]:
    """Return the folders with git-tracked files, parents before children; of `tests`, the first two levels."""
    tracked = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {Path(name).parent for name in tracked.splitlines() if (ROOT / name).exists()}
    found = {Path(*folder.parts[:2]) if folder.parts[0] == "tests" else folder for folder in found}
    return [f"{folder}/" for folder in sorted(found, key=lambda folder: (ROOMS.index(folder.parts[0]), folder.parts))]


def docstring(folder: str) -> str:
    """Return the first line of a package's docstring, else ""."""
    init = ROOT / folder / "__init__.py"
    text = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
    return text.splitlines()[0] if text else ""


def written(page: str) -> dict[str, str]:
    """Return the descriptions by folder, as they stand in the page."""
    found = MARKED.search(page)
    rows = [row.split(maxsplit=1) for row in found[2].splitlines()] if found else []
    return {row[0]: row[-1] for row in rows}


def tree(descriptions: dict[str, str]) -> str:
    """Return the tree as text: one line a folder."""
    rows = folders()
    width = max(len(row) for row in rows)
    return "".join(f"{row:<{width}}  {docstring(row) or descriptions.get(row, UNKNOWN)}\n" for row in rows)


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
