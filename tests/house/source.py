"""The git-tracked sources that the rules of the house are about."""

from __future__ import annotations

import ast
import gc
import subprocess
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("cli", "swarm", "optim", "dht", "peer")


@lru_cache
def tracked(*folders: str) -> tuple[Path, ...]:
    """Return the git-tracked files that exist, below these folders or everywhere, relative to the root."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file())


def modules() -> list[Path]:
    """Return the modules of the five packages."""
    return [path for path in tracked(*PACKAGES) if path.suffix == ".py"]


@lru_cache
def parsed(path: Path) -> ast.Module:
    """Parse a module, given relative to the root. Its tree stays, and is no place to look for garbage: that took three
    quarters of the time."""
    gc.disable()
    try:
        return ast.parse((ROOT / path).read_text(), str(path))
    finally:
        gc.freeze()
        gc.enable()
