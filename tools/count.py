"""Prints how large the five packages are: `python tools/count.py [CHECKOUT]`, of the git-tracked files.

An outside assignment is `x.y = ...` (also `+=`) where x is not `self` or `cls` and no class of the same module declares
or sets an attribute `y`: a module that changes an object of a class from another module.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

PACKAGES: Final = ("peer", "dht", "optim", "swarm", "cli")


class Size(NamedTuple):
    """Sizes of one module, of a package or of all."""

    lines: int = 0
    files: int = 0
    public_classes: int = 0
    outside_assignments: int = 0

    def plus(self, other: Size) -> Size:
        """Return the sums of both."""
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


def size(source: str) -> Size:
    """Measure a module."""
    nodes = list(ast.walk(ast.parse(source)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    stores = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    names = [node for owner in classes for node in ast.walk(owner) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in stores if _is_self(node.value)}
    outside = [node for node in stores if not _is_self(node.value) and node.attr not in own]
    public = [owner for owner in classes if not owner.name.startswith("_")]
    return Size(len(source.splitlines()), 1, len(public), len(outside))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def sizes(checkout: Path) -> dict[str, Size]:
    """Measure the packages of a checkout, and their total."""
    command = ["git", "-C", str(checkout), "ls-files", *(f"{package}/*.py" for package in PACKAGES)]
    found = dict.fromkeys((*PACKAGES, "total"), Size())
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if (checkout / name).is_file():
            module = size((checkout / name).read_text())
            for row in (name.split("/")[0], "total"):
                found[row] = found[row].plus(module)
    return found


def main() -> None:
    """Print a table: a row a package, and the total."""
    table = {"": Size._fields, **sizes(Path(*sys.argv[1:2]))}
    sys.stdout.write("".join("".join(f"{cell:>20}" for cell in (row, *cells)) + "\n" for row, cells in table.items()))


if __name__ == "__main__":
    main()
