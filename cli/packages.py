"""The five packages have common names; this says so if another one of that name is imported in their place."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from peer.errors import ConfigError

PACKAGES: Final = ("peer", "dht", "optim", "swarm", "cli")


def package_folder(name: str) -> Path | None:
    """Where the package would be imported from, without importing it; None if it is not found."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.origin is None:  # a mere folder of that name
        return next((Path(folder).resolve() for folder in spec.submodule_search_locations or ()), None)
    return Path(spec.origin).resolve().parent


def check_packages(names: Sequence[str] = PACKAGES) -> None:
    """Raise ConfigError unless all packages lie side by side in the folder this file is installed in."""
    home = Path(__file__).resolve().parent.parent
    for name in names:
        found = package_folder(name)
        if found is None:
            raise ConfigError(f"the package {name} is missing from {home}: install barnraise again.")
        if found != home / name:
            raise ConfigError(
                f"{found} shadows {home / name}: install barnraise in an environment of its own,"
                " and do not run it from a folder that has a package of that name."
            )
