"""Files that commands write for users: the commented RUN.toml of the embedded example."""

from __future__ import annotations

from importlib.resources import files


def template() -> str:
    """Return the commented RUN.toml of the embedded example."""
    return (files("cli.templates") / "run.toml").read_text()
