"""The version of this software, as published by peers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _read() -> str:
    try:
        return version("barnraise")
    except PackageNotFoundError:
        return "source"


VERSION = _read()
