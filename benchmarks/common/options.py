"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def writable(text: str) -> Path:
    """The file to which results go at the end, opened before anything is measured."""
    path = Path(text)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror})") from error
    return path
